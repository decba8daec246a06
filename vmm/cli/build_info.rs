//! Commit and date of a build, for line 2 of `--version`. The build scripts of the programs include
//! this file.
//!
//! A build script runs again when a source file of its program changes, but not when a commit
//! changes only documents. A program is therefore linked again only if it differs.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Number of digits of a commit hash. A length that git chooses would depend on the other commits
/// in a clone.
const HASH_DIGITS: usize = 12;
/// Environment variable that reproducible builds set to a date, in seconds since 1970.
const EPOCH: &str = "SOURCE_DATE_EPOCH";
const SECONDS_PER_DAY: i64 = 24 * 60 * 60;

/// Sets the environment variable `FORESHORE_BUILD` for the compiler.
#[cfg_attr(test, expect(dead_code, reason = "build scripts call it"))]
pub(crate) fn emit() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let root = package.ancestors().find(|folder| folder.join("Cargo.lock").exists());
    let root = root.unwrap_or(&package);
    let sources = sources(root, &package);
    for source in &sources {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    println!("cargo::rerun-if-env-changed={EPOCH}");
    let epoch = env::var(EPOCH).ok();
    println!("cargo::rustc-env=FORESHORE_BUILD={}", description(root, &sources, epoch.as_deref()));
}

/// Returns commit and date, or `unknown` if the sources are not in their own git repository.
fn description(root: &Path, sources: &BTreeSet<PathBuf>, epoch: Option<&str>) -> String {
    let commit = commit(root);
    let date = epoch.and_then(|seconds| seconds.parse().ok()).map(date);
    let date = date.or_else(|| commit.as_ref().map(|(_, date)| date.clone()));
    let mut text = match commit {
        None => "commit unknown".to_owned(),
        Some((hash, _)) if is_changed(root, sources) => format!("commit {hash} with changes"),
        Some((hash, _)) => format!("commit {hash}"),
    };
    if let Some(date) = date {
        text.push_str(", ");
        text.push_str(&date);
    }
    text
}

/// Returns the hash and date of the checked-out commit.
fn commit(root: &Path) -> Option<(String, String)> {
    // The sources may be in the git repository of another project.
    let top = git(root, &["rev-parse", "--show-toplevel"])?;
    if fs::canonicalize(top).ok()? != fs::canonicalize(root).ok()? {
        return None;
    }
    let log = git(root, &["log", "-1", "--format=%H %cs"])?;
    let (hash, date) = log.split_once(' ')?;
    Some((hash.chars().take(HASH_DIGITS).collect(), date.to_owned()))
}

fn is_changed(root: &Path, sources: &BTreeSet<PathBuf>) -> bool {
    let paths = sources.iter().filter_map(|path| path.to_str());
    let arguments: Vec<_> = ["status", "--porcelain", "--"].into_iter().chain(paths).collect();
    git(root, &arguments).is_none_or(|changes| !changes.is_empty())
}

fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    // Runs git without locks, because another git process may be working in the checkout.
    let mut git = Command::new("git");
    git.arg("--no-optional-locks").args(arguments).current_dir(root);
    ignore_outer_repository(&mut git);
    let output = git.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Removes the variables by which a git hook or a rebase passes the paths of its own repository.
fn ignore_outer_repository(git: &mut Command) {
    for variable in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
        git.env_remove(variable);
    }
}

/// Returns the sources of a package, and of all packages in the workspace that it depends on.
fn sources(root: &Path, package: &Path) -> BTreeSet<PathBuf> {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    // Lines such as `balloon = { path = "balloon" }`.
    let workspace = read(&root.join("Cargo.toml"));
    let packages: BTreeMap<_, _> = workspace
        .lines()
        .filter_map(|line| line.split_once(" = { path = \""))
        .filter_map(|(name, rest)| Some((name, rest.split('"').next()?)))
        .collect();
    let mut found = BTreeSet::from(["Cargo.lock", "Cargo.toml"].map(|name| root.join(name)));
    let mut folders = vec![package.to_owned()];
    while let Some(folder) = folders.pop() {
        let manifest = folder.join("Cargo.toml");
        let text = read(&manifest);
        if !found.insert(manifest) {
            continue;
        }
        found.insert(folder.join("src"));
        let names = text.lines().map(|line| line.split(['.', ' ']).next().unwrap_or_default());
        folders.extend(names.filter_map(|name| packages.get(name)).map(|path| root.join(path)));
    }
    found
}

/// Converts a time in seconds since 1970 to a UTC date.
fn date(seconds: i64) -> String {
    // Howard Hinnant's algorithm `civil_from_days`. Years start in March, and all eras of 400 years
    // have the same number of days.
    let days = seconds.div_euclid(SECONDS_PER_DAY) + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + 400 * era + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn commit_all(root: &Path) -> String {
        for arguments in [&["init", "-q"][..], &["add", "-A"]] {
            git(root, arguments).unwrap();
        }
        let mut commit = Command::new("git");
        commit.args(["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "m"]);
        ignore_outer_repository(&mut commit);
        commit.env("GIT_COMMITTER_DATE", "2026-03-01T12:00:00Z").current_dir(root);
        assert!(commit.status().unwrap().success());
        git(root, &["rev-parse", "HEAD"]).unwrap()[..HASH_DIGITS].to_owned()
    }

    #[test]
    fn commit_date_and_changes_of_the_sources_are_described() {
        let folder = TempDir::new().unwrap();
        let root = folder.path();
        write(root, "Cargo.toml", "[workspace.dependencies]\ntide = { path = \"tide\" }\n");
        write(root, "Cargo.lock", "");
        write(root, "tide/Cargo.toml", "");
        write(root, "tide/src/lib.rs", "");
        write(root, "moon/Cargo.toml", "[dependencies]\ntide.workspace = true\n");
        write(root, "moon/src/main.rs", "");
        write(root, "notes.txt", "");
        let sources = sources(root, &root.join("moon"));
        let described = |epoch| description(root, &sources, epoch);
        assert_eq!(described(None), "commit unknown");
        assert_eq!(described(Some("1709164800")), "commit unknown, 2024-02-29");
        let hash = commit_all(root);
        assert_eq!(described(None), format!("commit {hash}, 2026-03-01"));
        assert_eq!(described(Some("0")), format!("commit {hash}, 1970-01-01"));
        assert_eq!(described(Some("tomorrow")), format!("commit {hash}, 2026-03-01"));
        write(root, "notes.txt", "high");
        assert_eq!(described(None), format!("commit {hash}, 2026-03-01"));
        write(root, "tide/src/new.rs", "");
        assert_eq!(described(None), format!("commit {hash} with changes, 2026-03-01"));
        // A commit in the repository of another project does not describe these sources.
        assert_eq!(description(&root.join("moon"), &sources, None), "commit unknown");
    }

    #[test]
    fn sources_are_those_of_all_dependencies_in_the_workspace() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = package.ancestors().nth(2).unwrap();
        let names = |package: &str| -> Vec<_> {
            let sources = sources(root, &root.join(package));
            let names = sources.iter().map(|path| path.strip_prefix(root).unwrap().to_owned());
            names.filter(|path| path.ends_with("src")).collect()
        };
        let expected = ["pmem-volume/pmvol/src", "pmem-volume/src", "vmm/cli/src", "vmm/types/src"];
        assert_eq!(names("pmem-volume/pmvol"), expected.map(PathBuf::from));
        let expected = ["guest/agent/src", "guest/proto/src", "vmm/types/src"];
        assert_eq!(names("guest/agent"), expected.map(PathBuf::from));
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (-1, "1969-12-31"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (4_107_542_399, "2100-02-28"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }
}
