//! Checks that a rewrite of comments and documents keeps the facts of the old text.
//!
//! A fact is a back-ticked word, a number, or the name of a C file or a kernel function. If a
//! comment loses a fact, a new comment in the same file must contain it. If a document loses a
//! fact, new text in any document may contain it, because pages are split and merged. A commit
//! message lists facts dropped on purpose: `Dropped facts: mm/foo.c; 5.10`.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::repository::Repository;

/// Prefix of a line in a commit message that lists dropped facts, separated by semicolons.
const DROPPED: &str = "Dropped facts:";

/// Returns facts that the work tree has lost since `base`, except those that a later commit message
/// lists as dropped.
pub(crate) fn lost(repository: &Repository, base: &str) -> Result<Vec<String>> {
    let dropped = dropped(&repository.messages_since(base)?);
    let mut changes = parse_diff(&repository.text_diff(base)?);
    for path in repository.untracked()? {
        let added = repository.read(&path)?.unwrap_or_default();
        changes.push(Change { path, added, removed: Vec::new() });
    }
    let documents = facts_of(changes.iter().filter(|change| is_document(&change.path)));
    let mut lost = Vec::new();
    for change in &changes {
        let own_facts = facts_of([change]);
        let remaining = if is_document(&change.path) { &documents } else { &own_facts };
        for (line, text) in &change.removed {
            let text = prose(&change.path, text);
            let mut missing = facts(&text);
            missing.retain(|fact| !remaining.contains(fact) && !dropped.contains(fact));
            lost.extend(missing.iter().map(|fact| format!("{}:{line}: {fact}", change.path)));
        }
    }
    Ok(lost)
}

/// Changes to a file: its path in the work tree, the added text, and removed texts with their old
/// line numbers.
#[derive(Debug, PartialEq)]
struct Change {
    path: String,
    added: String,
    removed: Vec<(usize, String)>,
}

fn is_document(path: &str) -> bool {
    path.ends_with(".md")
}

fn facts_of<'a>(changes: impl IntoIterator<Item = &'a Change>) -> BTreeSet<String> {
    changes.into_iter().flat_map(|change| facts(&prose(&change.path, &change.added))).collect()
}

/// Parses `git diff --unified=0`. Lines in a hunk start with `+` or `-`, so they cannot be mistaken
/// for a header.
fn parse_diff(diff: &str) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    let mut old_path = "";
    let mut is_header = true;
    for line in diff.lines() {
        if line.starts_with("diff --git ") {
            is_header = true;
        } else if let Some(path) = line.strip_prefix("--- ").filter(|_| is_header) {
            old_path = path.strip_prefix("a/").unwrap_or("");
        } else if let Some(path) = line.strip_prefix("+++ ").filter(|_| is_header) {
            let path = path.strip_prefix("b/").unwrap_or(old_path).to_owned();
            changes.push(Change { path, added: String::new(), removed: Vec::new() });
        } else if let (Some(range), Some(change)) = (line.strip_prefix("@@ -"), changes.last_mut())
        {
            is_header = false;
            let start = range.split([',', ' ']).next().and_then(|start| start.parse().ok());
            change.removed.push((start.unwrap_or(0), String::new()));
        } else if let Some(change) = changes.last_mut().filter(|_| !is_header) {
            let old = change.removed.last_mut().map(|(_, text)| text);
            let (text, line) = match (line.strip_prefix('+'), line.strip_prefix('-'), old) {
                (Some(line), _, _) => (&mut change.added, line),
                (_, Some(line), Some(old)) => (old, line),
                _ => continue,
            };
            text.push_str(line);
            text.push('\n');
        }
    }
    changes
}

/// Returns the text to check: a whole document, or the comments in code.
fn prose(path: &str, text: &str) -> String {
    if is_document(path) {
        return text.replace('\n', " ");
    }
    let comments = text.lines().filter_map(|line| {
        let line = line.trim_start();
        let behind_code = || line.split_once(" // ").map(|(_, comment)| comment);
        match line.strip_prefix("//") {
            Some(comment) => Some(comment.trim_start_matches(['/', '!'])),
            None => behind_code(),
        }
    });
    comments.collect::<Vec<_>>().join(" ")
}

fn facts(text: &str) -> BTreeSet<String> {
    let mut facts = BTreeSet::new();
    for (index, span) in text.split('`').enumerate() {
        let is_code = index % 2 == 1;
        if is_code {
            facts.insert(span.split_whitespace().collect::<Vec<_>>().join(" "));
        } else {
            facts.extend(span.split(is_separator).filter_map(fact));
        }
    }
    facts
}

fn is_separator(letter: char) -> bool {
    letter.is_whitespace() || "|[]\"'!?;:<>=*~–…".contains(letter)
}

/// Returns the number, C file or function with parentheses in `word`. Ignores thousands separators
/// and a full stop at the end of a sentence.
fn fact(word: &str) -> Option<String> {
    let word = word.trim_end_matches(['.', ',', ')']).trim_start_matches(['(', '-', '+']);
    let is_function = word.ends_with('(') && word.len() > 1;
    if is_function || [".c", ".h", ".S"].iter().any(|end| word.ends_with(end)) {
        return Some(word.trim_end_matches('(').to_owned());
    }
    if !word.starts_with(|letter: char| letter.is_ascii_digit()) {
        return None;
    }
    // The digits may be followed by a unit, or by a comma and more text.
    let end = word.find(|letter: char| !letter.is_ascii_alphanumeric() && !".,".contains(letter));
    let number = word[..end.unwrap_or(word.len())].split_inclusive(',');
    let is_group = |group: &&str| group.starts_with(|letter: char| letter.is_ascii_digit());
    let number: String = number.take_while(is_group).collect();
    Some(number.replace(',', ""))
}

fn dropped(messages: &str) -> BTreeSet<String> {
    let lists = messages.lines().filter_map(|line| line.trim().strip_prefix(DROPPED));
    lists.flat_map(|list| list.split(';')).map(|fact| fact.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn facts_are_code_numbers_files_and_functions() {
        let text = "At 4,096 bytes (section 5.15), `a\nb` is split by mm/vmscan.c's or page_c.c, \
                    see shrink_node() with 2M,more. A word, a dash-ed one.";
        let expected = ["2M", "4096", "5.15", "a b", "mm/vmscan.c", "page_c.c", "shrink_node"];
        assert_eq!(facts(text), BTreeSet::from(expected.map(str::to_owned)));
    }

    #[test]
    fn comments_are_read_and_code_is_not() {
        let text = "//! One.\n    /// Two `x`.\nlet a = 5; // Three 3.\n// Four.\n";
        assert_eq!(prose("a.rs", text), " One.  Two `x`. Three 3.  Four.");
    }

    #[test]
    fn diff_is_parsed_by_file_and_hunk() {
        let diff = "diff --git a/x.rs b/y.rs\nsimilarity index 90%\n--- a/x.rs\n+++ b/y.rs\n\
                    @@ -3,2 +3 @@ fn f() {\n-// a\n--- b\n+// c\n@@ -9 +8,0 @@\n-// d\n\
                    diff --git a/z.md b/z.md\n--- a/z.md\n+++ /dev/null\n@@ -1 +0,0 @@\n-e\n";
        let removed = vec![(3, "// a\n-- b\n".to_owned()), (9, "// d\n".to_owned())];
        let y = Change { path: "y.rs".to_owned(), added: "// c\n".to_owned(), removed };
        let removed = vec![(1, "e\n".to_owned())];
        let z = Change { path: "z.md".to_owned(), added: String::new(), removed };
        assert_eq!(parse_diff(diff), [y, z]);
    }

    #[test]
    fn lost_fact_is_reported_until_a_commit_lists_it() {
        let folder = tempfile::tempdir().unwrap();
        let repository = Repository::at(folder.path());
        let write = |path: &str, text: &str| fs::write(folder.path().join(path), text).unwrap();
        let commit = |message: &str| {
            repository.git(&["add", "--all"]).unwrap();
            let (name, address) = ("user.name=a", "user.email=a@localhost");
            let message = ["-c", name, "-c", address, "commit", "--quiet", "-m", message];
            repository.git(&message).unwrap();
        };
        repository.git(&["init", "--quiet"]).unwrap();
        write("a.rs", "// See mm/a.c at 512.\nfn f() {}\n");
        write("b.rs", "// Nothing.\nfn g() {}\n");
        write("a.md", "At 7 o'clock, `x`.\n");
        commit("base");

        write("a.rs", "// Reads 512 bytes.\nfn f() {}\n");
        write("b.rs", "// A fact of another file: mm/a.c\nfn g() {}\n");
        fs::remove_file(folder.path().join("a.md")).unwrap();
        write("new.md", "Parameter `x`.\n");
        assert_eq!(lost(&repository, "HEAD").unwrap(), ["a.md:1: 7", "a.rs:1: mm/a.c"]);
        commit("words\n\nDropped facts: 7; mm/a.c");
        assert!(lost(&repository, "HEAD~").unwrap().is_empty());
    }
}
