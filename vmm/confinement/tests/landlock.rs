//! Limits of files. Landlock limits a thread, so each attempt runs on a new one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use foreshore_confinement::landlock::{Access, Rule, restrict};
use tempfile::TempDir;

/// Runs `attempt` on a thread with these rules. Returns `None` if the kernel has no Landlock.
fn limited<T: Send + 'static>(
    rules: &[Rule],
    attempt: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Option<io::Result<T>> {
    let rules = rules.to_owned();
    let run = move || restrict(&rules).unwrap().map(|_| attempt());
    let result = thread::spawn(run).join().unwrap();
    if result.is_none() {
        eprintln!("skipped: the kernel has no Landlock");
    }
    result
}

/// Folder with the files `inside/file` and `outside/file`.
fn folders() -> (TempDir, PathBuf, PathBuf) {
    let folder = TempDir::new().unwrap();
    let [inside, outside] = ["inside", "outside"].map(|name| folder.path().join(name));
    for path in [&inside, &outside] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("file"), "content").unwrap();
    }
    (folder, inside, outside)
}

fn rule(path: &Path, access: Access) -> Vec<Rule> {
    vec![Rule { path: path.to_owned(), access }]
}

/// Action on a file, by name.
type Attempt = (&'static str, fn(&Path) -> io::Result<()>);

const READS: [Attempt; 2] = [
    ("read", |file| fs::read(file).map(drop)),
    ("list", |file| fs::read_dir(file.parent().unwrap()).map(drop)),
];
const WRITES: [Attempt; 4] = [
    ("write", |file| File::options().write(true).open(file).map(drop)),
    ("create", |file| File::create_new(file.with_extension("new")).map(drop)),
    ("bind", |file| {
        std::os::unix::net::UnixListener::bind(file.with_extension("socket")).map(drop)
    }),
    ("rename", |file| fs::rename(file, file.with_extension("renamed"))),
];

fn is_permitted((name, attempt): Attempt, rules: &[Rule], file: &Path) -> Option<bool> {
    let file = file.to_owned();
    match limited(rules, move || attempt(&file))? {
        Ok(()) => Some(true),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(false),
        Err(error) => panic!("{name}: {error}"),
    }
}

#[test]
fn rule_permits_its_access_below_its_folder_only() {
    for (access, reads, writes) in [(Access::Read, true, false), (Access::ReadWrite, true, true)] {
        for (attempts, expected) in [(&READS[..], reads), (&WRITES[..], writes)] {
            for attempt in attempts {
                let (_folder, inside, outside) = folders();
                let rules = rule(&inside, access);
                let Some(outer) = is_permitted(*attempt, &rules, &outside.join("file")) else {
                    return;
                };
                assert!(!outer, "{} outside", attempt.0);
                let inner = is_permitted(*attempt, &rules, &inside.join("file"));
                assert_eq!(inner, Some(expected), "{} inside, {access:?}", attempt.0);
                // Without limits, everything is permitted.
                attempt.1(&outside.join("file")).unwrap();
            }
        }
    }
}

#[test]
fn removal_does_not_permit_reads_and_writes() {
    let (_folder, inside, _outside) = folders();
    let rules = rule(&inside, Access::Remove);
    let file = inside.join("file");
    for attempt in READS.into_iter().chain(WRITES) {
        let Some(permitted) = is_permitted(attempt, &rules, &file) else { return };
        assert!(!permitted, "{}", attempt.0);
    }
    limited(&rules, move || fs::remove_file(file)).unwrap().unwrap();
}

#[test]
fn rule_for_a_file_permits_no_other_file() {
    let (_folder, inside, _outside) = folders();
    fs::write(inside.join("other"), "").unwrap();
    let rules = rule(&inside.join("file"), Access::ReadWrite);
    let write = WRITES[0];
    let Some(file) = is_permitted(write, &rules, &inside.join("file")) else { return };
    assert!(file);
    assert_eq!(is_permitted(write, &rules, &inside.join("other")), Some(false));
    assert_eq!(is_permitted(WRITES[1], &rules, &inside.join("file")), Some(false));
}

#[test]
fn missing_path_is_no_error() {
    let rules = rule(Path::new("/nonexistent"), Access::Read);
    let Some(read) = limited(&rules, || fs::read("/etc/passwd")) else { return };
    assert_eq!(read.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
}
