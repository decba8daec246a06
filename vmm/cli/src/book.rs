//! Command lines that the book and the README show, for the tests of the programs.

pub mod script;

use std::fs;
use std::path::{Path, PathBuf};

/// Command line of a program, as a page shows it.
#[derive(Debug, PartialEq)]
pub struct BookCommand {
    /// Path of the page below the repository.
    pub page: PathBuf,
    /// Words of the command, without the name of the program.
    pub arguments: Vec<String>,
}

/// Programs whose command lines the book shows.
const PROGRAMS: [&str; 5] =
    ["foreshore", "foreshore-remote", "foreshore-agent", "foreshore-sim", "pmvol"];

/// Programs that run the command in their arguments.
const WRAPPERS: [&str; 4] = ["ssh", "sudo", "systemd-run", "watch"];

/// Words of the shell that precede a command.
const KEYWORDS: [&str; 6] = ["do", "else", "if", "then", "until", "while"];

/// Returns all command lines of `program` in the book and the README. Ellipses are left out.
///
/// Panics if a page cannot be read, or if a shell could not split a command of one of our programs.
pub fn commands(program: &str) -> Vec<BookCommand> {
    let of_page = |(page, text): (PathBuf, String)| {
        let commands = commands_in(&text, program)
            .unwrap_or_else(|line| panic!("{}: a shell cannot split: {line}", page.display()));
        commands.into_iter().map(move |arguments| BookCommand { page: page.clone(), arguments })
    };
    pages().into_iter().flat_map(of_page).collect()
}

/// Returns the path and the text of each page of the book, and of the README.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![PathBuf::from("README.md")];
    add_pages(&root, Path::new("docs"), &mut pages);
    pages.sort();
    let read = |page: PathBuf| {
        let text = fs::read_to_string(root.join(&page)).expect("a page of the book is readable");
        (page, text)
    };
    pages.into_iter().map(read).collect()
}

fn add_pages(root: &Path, folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root.join(folder)).expect("the book exists") {
        let name = entry.expect("the book is readable").file_name();
        let path = folder.join(name);
        if root.join(&path).is_dir() {
            add_pages(root, &path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

/// Returns the arguments of each command of `program` in the blocks of `text`, or the line of one
/// of our programs that a shell could not split.
fn commands_in(text: &str, program: &str) -> Result<Vec<Vec<String>>, String> {
    let mut found = Vec::new();
    for block in blocks(text) {
        for line in logical_lines(&block.lines) {
            match simple_commands(&line) {
                Some(commands) => found.extend(commands),
                None if names_program(&line) => return Err(line),
                None => {}
            }
        }
    }
    found.retain(|command| command.first().is_some_and(|first| first == program));
    Ok(found.into_iter().map(|command| command[1..].to_vec()).collect())
}

/// Block of lines that can be commands.
#[derive(Default)]
struct Block<'a> {
    lines: Vec<&'a str>,
    /// Value of the marker `<!-- needs: VALUE -->` above the block.
    needs: Option<&'a str>,
}

impl Block<'_> {
    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.needs.is_none()
    }
}

/// Returns each block of `text` that can hold commands: indented blocks, and fenced blocks marked
/// with `sh` or nothing. A marker without such a block below it is a block without lines.
///
/// Other fenced blocks hold output, files or summaries of flags. In an indented block, a line of
/// output does not start with the name of a program.
fn blocks(text: &str) -> Vec<Block<'_>> {
    const FENCE: &str = "```";
    let mut blocks = Vec::new();
    let mut block = Block::default();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        let is_indented = line.starts_with("    ");
        if let Some(language) = text.strip_prefix(FENCE) {
            if !block.lines.is_empty() {
                blocks.push(std::mem::take(&mut block));
            }
            let fenced = lines.by_ref().take_while(|line| !line.trim_start().starts_with(FENCE));
            let fenced: Vec<_> = fenced.map(str::trim_start).collect();
            if ["", "sh"].contains(&language.trim()) {
                block.lines = fenced;
            }
            blocks.push(std::mem::take(&mut block));
        } else if let Some(need) = needs_of(text) {
            blocks.push(std::mem::take(&mut block));
            block.needs = Some(need);
        } else if is_indented {
            block.lines.push(text);
        } else if !text.is_empty() {
            blocks.push(std::mem::take(&mut block));
        }
    }
    blocks.push(block);
    blocks.retain(|block| !block.is_empty());
    blocks
}

/// Returns the value of a marker, a comment that readers do not see.
fn needs_of(line: &str) -> Option<&str> {
    line.strip_prefix("<!-- needs: ")?.strip_suffix(" -->")
}

/// Joins the lines of a block at backslashes, and where a quotation continues on the next line.
fn logical_lines(block: &[&str]) -> Vec<String> {
    let mut joined = Vec::new();
    let mut rest = block;
    while !rest.is_empty() {
        let complete = |count: &usize| {
            let line = join(&rest[..*count]);
            !line.ends_with('\\') && shlex::split(&line).is_some()
        };
        // A line without a closing quotation stands alone.
        let count = (1..=rest.len()).find(complete).unwrap_or(1);
        joined.push(join(&rest[..count]));
        rest = &rest[count..];
    }
    joined
}

fn join(lines: &[&str]) -> String {
    lines.join("\n").replace("\\\n", "")
}

/// Returns true if a command of `line`, which a shell could not split, starts with the name of one
/// of our programs.
fn names_program(line: &str) -> bool {
    line.split(['|', '&', ';', '(', '`']).any(|command| {
        let mut words = command.split_whitespace().skip_while(|word| KEYWORDS.contains(word));
        words.next().is_some_and(|word| PROGRAMS.contains(&word))
    })
}

/// Returns the commands of a line, and those of the scripts in its words. `None` if a shell could
/// not split the line.
fn simple_commands(line: &str) -> Option<Vec<Vec<String>>> {
    let mut commands = Vec::new();
    for command in split_at_operators(line)? {
        for script in inner_scripts(&command) {
            commands.extend(simple_commands(script)?);
        }
        commands.push(without_prefix(command));
    }
    Some(commands)
}

/// Returns the commands of a line without those of the scripts in its words.
fn outer_commands(line: &str) -> Option<Vec<Vec<String>>> {
    Some(split_at_operators(line)?.into_iter().map(without_prefix).collect())
}

/// Splits a line at the operators of the shell, and each command into words. Redirections and
/// comments are left out.
fn split_at_operators(line: &str) -> Option<Vec<Vec<String>>> {
    const OPERATORS: [&str; 5] = ["|", "||", "&&", "&", ";"];
    // shlex splits only at spaces.
    let words = shlex::split(&line.replace("; ", " ; "))?;
    let commands = words.split(|word| OPERATORS.contains(&word.as_str()));
    let without_redirections = |command: &[String]| {
        let words = command.iter().filter(|word| *word != "..." && !word.contains('>'));
        words.cloned().collect()
    };
    Some(commands.map(without_redirections).collect())
}

/// Returns the scripts in the words of a command: `$(SCRIPT)` and `sh -c SCRIPT`.
fn inner_scripts(command: &[String]) -> impl Iterator<Item = &str> {
    let substituted = |word: &'_ String| -> Option<(usize, usize)> {
        let start = word.find("$(")? + 2;
        Some((start, start + word[start..].rfind(')')?))
    };
    let substitutions = command
        .iter()
        .filter_map(move |word| substituted(word).map(|(start, end)| &word[start..end]));
    let shells = command.windows(3).filter(|words| words[0] == "sh" && words[1] == "-c");
    substitutions.chain(shells.map(|words| words[2].as_str()))
}

/// Removes keywords of the shell, variables and wrappers from the start of a command.
fn without_prefix(mut words: Vec<String>) -> Vec<String> {
    let is_prefix = |word: &String| KEYWORDS.contains(&word.as_str()) || is_assignment(word);
    let start = words.iter().position(|word| !is_prefix(word)).unwrap_or(words.len());
    words.drain(..start);
    if words.first().is_some_and(|word| WRAPPERS.contains(&word.as_str()))
        && let Some(at) = words.iter().position(|word| PROGRAMS.contains(&word.as_str()))
    {
        words.drain(..at);
    }
    words
}

fn is_assignment(word: &str) -> bool {
    let is_name = |name: &str| {
        !name.is_empty()
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
    };
    word.split_once('=').is_some_and(|(name, _)| is_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_blocks_only() {
        let text = "\
Run `pool create`:

    # A comment with pool create /c
    pool create /a --size 1G \\
        --reserve 4M    # as said
    while pool ping >/dev/null 2>&1; do sleep 1; done
    pool check POOL && cp POOL POOL.bak
    other ... pool
    pool ... --name \"a b\" &
";
        let expected: [&[&str]; 4] = [
            &["create", "/a", "--size", "1G", "--reserve", "4M"],
            &["ping"],
            &["check", "POOL"],
            &["--name", "a b"],
        ];
        assert_eq!(commands_in(text, "pool").unwrap(), expected);
    }

    #[test]
    fn fenced_blocks_of_commands_are_read_and_others_are_not() {
        let text = "\
```sh
pool create /a \\
  --size 1G
```
```
pool info /a
```
   ```text
   pool [--flag]
   ```
pool is a word of the text
";
        let expected: [&[&str]; 2] = [&["create", "/a", "--size", "1G"], &["info", "/a"]];
        assert_eq!(commands_in(text, "pool").unwrap(), expected);
    }

    #[test]
    fn commands_are_found_behind_wrappers_and_in_scripts() {
        let text = "\
Text:
    A=1 pmvol info a
    ssh HOST pmvol info b
    screen \"$(pmvol info c | jq -r .a)\"
    host -- sh -c 'pmvol info \"d
      e\"; exit'
    install pmvol /usr/bin
";
        let expected: [&[&str]; 4] =
            [&["info", "a"], &["info", "b"], &["info", "c"], &["info", "d\ne"]];
        assert_eq!(commands_in(text, "pmvol").unwrap(), expected);
    }

    #[test]
    fn command_that_a_shell_cannot_split_is_an_error() {
        let quoted = "    while pmvol info \"a; do\n    pmvol info b\n";
        assert_eq!(commands_in(quoted, "pool").unwrap_err(), "while pmvol info \"a; do");
        let output = "    pool: it's full\n    pool info a\n";
        assert_eq!(commands_in(output, "pool").unwrap(), [["info", "a"]]);
    }

    #[test]
    fn vm_from_a_debian_image_takes_ten_commands() {
        let pages = pages();
        let is_tutorial = |(page, _): &&(PathBuf, String)| page.ends_with("debian-vm.md");
        let (_, text) = pages.iter().find(is_tutorial).expect("the page exists");
        let (_, steps) = text.split_once("\n## 1. ").expect("the page has a first step");
        let (steps, _) = steps.split_once("\n## 5. ").expect("the page has five steps");
        let lines = blocks(steps).into_iter().flat_map(|block| logical_lines(&block.lines));
        let lines: Vec<_> = lines.collect();
        assert_eq!(lines.len(), 10, "{lines:#?}");
        assert!(lines.iter().all(|line| !line.contains("&&") && !line.contains(';')), "{lines:#?}");
    }

    /// The tests of the agent do not parse command lines of the book.
    #[test]
    fn book_has_no_command_line_of_the_agent() {
        assert_eq!(commands("foreshore-agent"), []);
    }
}
