//! Scripts of the blocks of commands, which the tests run.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use thiserror::Error;

use super::{
    Block, PROGRAMS, blocks, is_assignment, logical_lines, outer_commands, pages, simple_commands,
};

/// Values of the marker `<!-- needs: VALUE -->`, with the reason why no test runs the block below
/// it. Blocks without a marker run in the tests of the programs, and those with a command for a VMM
/// in the guest tests.
const NEEDS: [(&str, &str); 4] = [
    ("hardware", "more CPUs or NUMA nodes than the emulated host has"),
    ("network", "a download, or a network of the host"),
    ("root", "devices or settings of the machine"),
    ("space", "more space than a test has"),
];

/// Error in a marker, or contradiction between a marker and the block below it.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum MarkerError {
    #[error("unknown marker {value}, must be one of {known:?}")]
    Unknown { value: String, known: Vec<&'static str> },
    #[error("marker {value} without a block of commands below it")]
    WithoutBlock { value: String },
    #[error("marker {value} above a block that no test would run: {line}")]
    Needless { value: String, line: String },
}

/// Runnable blocks of a page.
pub struct PageScripts {
    /// Path of the page below the repository.
    pub page: PathBuf,
    /// Script of each block, a command per line.
    pub scripts: Vec<String>,
}

/// Returns the lines with commands of `program` in all blocks without a marker, by page.
///
/// The lines with assignments and options of the shell, on which the commands may depend, are
/// returned too. Panics if a marker is wrong.
pub fn scripts(program: &str) -> Vec<PageScripts> {
    let of_page = |(page, text): (PathBuf, String)| {
        let scripts = scripts_in(&text, program)
            .unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        PageScripts { page, scripts }
    };
    pages().into_iter().map(of_page).filter(|page| !page.scripts.is_empty()).collect()
}

/// Returns the pages that have blocks for the guest tests. Panics if a marker is wrong.
pub fn pages_with_guest_blocks() -> Vec<PathBuf> {
    let has_blocks = |(page, text): &(PathBuf, String)| {
        let blocks = guest_blocks(text);
        !blocks.unwrap_or_else(|error| panic!("{}: {error}", page.display())).is_empty()
    };
    pages().into_iter().filter(has_blocks).map(|(page, _)| page).collect()
}

/// Line of a block for the guest tests.
#[derive(Debug, PartialEq, Eq)]
pub struct GuestLine {
    /// Line as on the page, without its continuations.
    pub text: String,
    /// Programs of the line's commands.
    pub programs: Vec<String>,
}

/// Returns the lines of each block of `text` that has a command for a VMM and no marker. Comments
/// are left out.
pub fn guest_blocks(text: &str) -> Result<Vec<Vec<GuestLine>>, MarkerError> {
    let unmarked = unmarked_blocks(text)?.into_iter();
    let blocks = unmarked.map(|block| logical_lines(&block.lines));
    let for_guest = blocks.filter(|lines| lines.iter().any(|line| needs_vmm(line)));
    Ok(for_guest.map(guest_lines).collect())
}

fn guest_lines(lines: Vec<String>) -> Vec<GuestLine> {
    let line = |text: String| {
        let commands = outer_commands(&text).unwrap_or_default();
        let programs: Vec<_> =
            commands.into_iter().filter_map(|words| words.into_iter().next()).collect();
        let is_command = !text.trim_start().starts_with('#') && !text.trim().is_empty();
        is_command.then_some(GuestLine { text, programs })
    };
    lines.into_iter().filter_map(line).collect()
}

/// Returns the script of each block of `text` without a marker.
fn scripts_in(text: &str, program: &str) -> Result<Vec<String>, MarkerError> {
    let blocks = unmarked_blocks(text)?;
    Ok(blocks.iter().filter_map(|block| script_of(block, program)).collect())
}

fn unmarked_blocks(text: &str) -> Result<Vec<Block<'_>>, MarkerError> {
    let mut blocks = blocks(text);
    blocks.iter().try_for_each(check_marker)?;
    blocks.retain(|block| block.needs.is_none());
    Ok(blocks)
}

fn check_marker(block: &Block<'_>) -> Result<(), MarkerError> {
    let Some(value) = block.needs.map(str::to_owned) else { return Ok(()) };
    let known = NEEDS.map(|(name, _)| name);
    if !known.contains(&value.as_str()) {
        return Err(MarkerError::Unknown { value, known: known.to_vec() });
    }
    let lines = logical_lines(&block.lines);
    let Some(line) = lines.first() else { return Err(MarkerError::WithoutBlock { value }) };
    let is_ours =
        |words: &Vec<String>| words.first().is_some_and(|first| PROGRAMS.contains(&first.as_str()));
    let mut commands = lines.iter().filter_map(|line| simple_commands(line)).flatten();
    match commands.any(|words| is_ours(&words)) {
        true => Ok(()),
        false => Err(MarkerError::Needless { value, line: line.clone() }),
    }
}

/// Returns true if a line starts a VMM or calls its API.
fn needs_vmm(line: &str) -> bool {
    const WITHOUT_VMM: [&str; 4] = ["--help", "--version", "completion", "man"];
    let is_for_vmm = |words: &Vec<String>| {
        let [program, arguments @ ..] = &words[..] else { return false };
        ["foreshore", "foreshore-remote"].contains(&program.as_str())
            && !arguments.first().is_some_and(|first| WITHOUT_VMM.contains(&first.as_str()))
    };
    outer_commands(line).unwrap_or_default().iter().any(is_for_vmm)
}

fn script_of(block: &Block<'_>, program: &str) -> Option<String> {
    let runs_program = |line: &str| {
        let commands = simple_commands(line).unwrap_or_default();
        commands.iter().any(|command| command.first().is_some_and(|first| first == program))
    };
    let lines = logical_lines(&block.lines);
    lines.iter().any(|line| runs_program(line)).then(|| {
        let lines = lines.into_iter().filter(|line| runs_program(line) || sets_up(line));
        lines.collect::<Vec<_>>().join("\n")
    })
}

/// Returns true for options of the shell, and for a line of assignments without a command.
fn sets_up(line: &str) -> bool {
    let words = shlex::split(line).unwrap_or_default();
    match words.first().map(String::as_str) {
        None => false,
        Some("set") => true,
        Some("export") => words[1..].iter().all(|word| is_assignment(word)),
        Some(_) => words.iter().all(|word| is_assignment(word)),
    }
}

/// Programs that a machine may lack. A script that needs a missing one is skipped.
const OPTIONAL_PROGRAMS: [&str; 2] = ["jq", "zstd"];

/// Replaces the paths of the book by paths below `folder`. Each of `paths` is a path of the book
/// with its path below the folder.
///
/// Panics if the script uses other absolute paths or the home directory.
pub fn map_paths(script: &str, folder: &Path, paths: &[(&str, &str)]) -> String {
    let root = folder.to_str().expect("the path of the folder is UTF-8");
    let map = |text: String, (of_book, name): &(&str, &str)| {
        text.replace(of_book, &format!("{root}/{name}"))
    };
    let mapped = paths.iter().fold(script.to_owned(), map);
    let on_host = without_guest_paths(&mapped);
    assert_eq!(outside(&on_host, root), None, "a path is outside of the test's folder: {script}");
    mapped
}

/// Removes quoted values of `--cmdline`, whose paths are in the guest.
fn without_guest_paths(script: &str) -> String {
    let mut parts = script.split("--cmdline ");
    let first = parts.next().unwrap_or_default().to_owned();
    let after_value = |part: &str| {
        let quote = part.chars().next().filter(|first| ['\'', '"'].contains(first))?;
        part[1..].split_once(quote).map(|(_, after)| after.to_owned())
    };
    first
        + &parts
            .map(|part| after_value(part).unwrap_or_else(|| part.to_owned()))
            .collect::<String>()
}

/// Returns a word of the script that is a path outside of `root`.
fn outside<'a>(script: &'a str, root: &str) -> Option<&'a str> {
    let is_end = |letter: char| letter.is_whitespace() || "=<>\"'`();|&,:[]{}@".contains(letter);
    let is_outside = |word: &&str| {
        let is_other = word.starts_with('/') && !word.starts_with("//") && *word != "/dev/null";
        (is_other && !Path::new(word).starts_with(root))
            || word.split('/').any(|name| name == "..")
            || word.starts_with('~')
            || *word == "$HOME"
            || word.starts_with("$HOME/")
    };
    let home = script.find("${HOME").map(|at| &script[at..]);
    script.split(is_end).find(is_outside).or(home)
}

/// Runs a script with bash in `folder` until a command or a part of a pipe fails.
///
/// `paths` are those of [`map_paths`]. `program` is the path of the program under test. Panics if
/// the script fails. If the machine lacks an optional program of the script, prints the reason and
/// returns.
pub fn run(script: &str, program: &Path, folder: &Path, paths: &[(&str, &str)]) {
    let mapped = map_paths(script, folder, paths);
    if let Some(missing) = missing_program(script) {
        println!("skipped: {missing} is not installed: {script}");
        return;
    }
    let programs = folder.join("programs");
    fs::create_dir_all(&programs).unwrap();
    let link = programs.join(program.file_name().expect("the program has a name"));
    if !link.exists() {
        symlink(program, &link).unwrap();
    }
    let path = format!("{}:{}", programs.display(), env::var("PATH").unwrap());
    let output = Command::new("bash")
        .args(["-e", "-o", "pipefail", "-c", &mapped])
        .current_dir(folder)
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {}: {error}", output.status);
}

/// Returns an optional program of the script that is not in PATH.
fn missing_program(script: &str) -> Option<&'static str> {
    let commands = script.lines().filter_map(simple_commands).flatten();
    let used: Vec<_> = commands.filter_map(|words| words.into_iter().next()).collect();
    let folders = env::var_os("PATH").unwrap_or_default();
    let is_missing =
        |program: &&str| !env::split_paths(&folders).any(|dir| dir.join(program).exists());
    OPTIONAL_PROGRAMS
        .into_iter()
        .filter(|program| used.iter().any(|word| word == program))
        .find(is_missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: &str = "\
Text:

    folder=/a
    A=1 other
    pool info a
    other

    pool info b && cp a b

<!-- needs: root -->

    pmvol create /dev/a

    pmvol create /dev/b

Text:

    pool info c
";

    #[test]
    fn script_has_lines_of_the_program_in_blocks_without_marker() {
        let expected = ["folder=/a\npool info a\npool info b && cp a b", "pool info c"];
        assert_eq!(scripts_in(BLOCKS, "pool").unwrap(), expected);
    }

    #[test]
    fn marker_holds_for_one_block() {
        let text = "<!-- needs: root -->\n    pmvol info a\n```sh\npool info b\n```\n";
        assert_eq!(scripts_in(text, "pool").unwrap(), ["pool info b"]);
        let text = "<!-- needs: root -->\n```\npmvol info a\n```\n    pool info b\n";
        assert_eq!(scripts_in(text, "pool").unwrap(), ["pool info b"]);
    }

    #[test]
    fn wrong_marker_is_an_error() {
        let unknown = BLOCKS.replace("needs: root", "needs: money");
        let guest = BLOCKS.replace("needs: root", "needs: guest");
        let without_block = BLOCKS.replace("<!-- needs: root -->", "<!-- needs: root -->\n\nText");
        let twice =
            BLOCKS.replace("<!-- needs: root -->", "<!-- needs: root -->\n<!-- needs: space -->");
        let output = "<!-- needs: root -->\n```text\npmvol\n```\n";
        let others = "<!-- needs: root -->\n    mkfs.ext4 /dev/a\n";
        let unknown_error = |value: &str| MarkerError::Unknown {
            value: value.to_owned(),
            known: NEEDS.map(|(name, _)| name).to_vec(),
        };
        let value = || "root".to_owned();
        let line = "mkfs.ext4 /dev/a".to_owned();
        for (text, error) in [
            (&*unknown, unknown_error("money")),
            (&*guest, unknown_error("guest")),
            (&*without_block, MarkerError::WithoutBlock { value: value() }),
            (&*twice, MarkerError::WithoutBlock { value: value() }),
            (output, MarkerError::WithoutBlock { value: value() }),
            (others, MarkerError::Needless { value: value(), line }),
        ] {
            assert_eq!(scripts_in(text, "pool").unwrap_err(), error, "{text}");
        }
    }

    #[test]
    fn guest_lines_list_their_programs() {
        let text = "\
Text:

    foreshore --version

Text:

    # A VM:
    A=1 foreshore ... \\
        --kernel a &
    foreshore-remote info | jq .config
";
        let line = |text: &str, programs: &[&str]| GuestLine {
            text: text.to_owned(),
            programs: programs.iter().map(|name| (*name).to_owned()).collect(),
        };
        let vmm = line("A=1 foreshore ... --kernel a &", &["foreshore"]);
        let client = line("foreshore-remote info | jq .config", &["foreshore-remote", "jq"]);
        assert_eq!(guest_blocks(text), Ok(vec![vec![vmm, client]]));
        let marked = text.replace("Text:\n\n    #", "<!-- needs: space -->\n\n    #");
        assert_eq!(guest_blocks(&marked), Ok(vec![]));
    }

    #[test]
    fn paths_outside_of_the_folder_are_found() {
        for script in [
            "rm /a",
            "rm ~/a",
            "rm ~",
            "rm $HOME/a",
            "rm \"${HOME}/a\"",
            "rm b=/a",
            "A=x:/a",
            "rm /t/../a",
            "cp [/a,/t/b]",
            "rm /tt",
            "(cd /a)",
        ] {
            assert!(outside(script, "/t").is_some(), "{script}");
        }
        for script in ["rm /t/a", "rm a/b >/dev/null", "curl http://localhost/a", "rm $HOMES/a"] {
            assert_eq!(outside(script, "/t"), None, "{script}");
        }
        let script = "vmm --cmdline 'run=\"rm /a\"' --disk path=/b --cmdline /c";
        assert_eq!(without_guest_paths(script), "vmm  --disk path=/b /c");
    }
}
