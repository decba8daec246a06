//! Checks that references to documents, headings and included files can be resolved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use crate::repository::Repository;

/// Folder of the documents. Other files refer to a document by its path from the repository's root.
const DOCS: &str = "docs/";
const MARKDOWN: &str = ".md";
const INCLUDES: [&str; 2] = ["include_str!(\"", "include_bytes!(\""];

/// Returns references in the repository's text files to missing files and headings.
pub(crate) fn unresolved(repository: &Repository) -> Result<Vec<String>> {
    let root = repository.root();
    let mut texts = BTreeMap::new();
    let mut headings = BTreeMap::new();
    for file in repository.files()? {
        if let Some(text) = repository.read(&file)? {
            if file.ends_with(MARKDOWN) {
                headings.insert(root.join(&file).canonicalize()?, anchors(&text));
            }
            texts.insert(file, text);
        }
    }
    let mut unresolved = Vec::new();
    for (file, text) in &texts {
        for (line, content) in (1..).zip(text.lines()) {
            for (reference, folder) in references(file, content) {
                let (path, anchor) = match reference.split_once('#') {
                    Some((path, anchor)) => (path, Some(anchor)),
                    None => (reference, None),
                };
                let path = if path.is_empty() { Path::new(file) } else { &folder.join(path) };
                let has_heading = |path, anchor| {
                    headings.get(path).is_some_and(|known: &BTreeSet<_>| known.contains(anchor))
                };
                let kind = match (root.join(path).canonicalize(), anchor) {
                    (Err(_), _) => "file",
                    (Ok(path), Some(anchor)) if !has_heading(&path, anchor) => "heading",
                    _ => continue,
                };
                unresolved.push(format!("{file}:{line}: no such {kind}: {reference}"));
            }
        }
    }
    Ok(unresolved)
}

/// Returns the references in a line. The folder next to each is the folder that it is relative to.
fn references<'text>(file: &'text str, line: &'text str) -> Vec<(&'text str, &'text Path)> {
    let folder = Path::new(file).parent().unwrap_or(Path::new(""));
    let mut relative = Vec::new();
    if file.ends_with(MARKDOWN) {
        let is_local = |link: &&str| !link.contains("://") && !link.contains(char::is_whitespace);
        relative.extend(between(line, "](", ')').filter(is_local));
    }
    if file.ends_with(".rs") {
        INCLUDES.iter().for_each(|start| relative.extend(between(line, start, '"')));
    }
    let relative = relative.into_iter().map(|reference| (reference, folder));
    // A link's text may contain another document's full path.
    relative.chain(mentions(line).map(|mention| (mention, Path::new("")))).collect()
}

fn between<'line>(line: &'line str, start: &str, end: char) -> impl Iterator<Item = &'line str> {
    line.split(start).skip(1).filter_map(move |rest| rest.split(end).next())
}

/// Returns the paths of documents in a line, with their anchors. Skips matches that are the end of
/// another path, for example of a kernel file or a link.
fn mentions(line: &str) -> impl Iterator<Item = &str> {
    let is_part = |letter: char| letter.is_alphanumeric() || "/._-#".contains(letter);
    let words = line.split(move |letter| !is_part(letter)).filter(|word| word.starts_with(DOCS));
    words.filter_map(|word| {
        let len = word.find(MARKDOWN)? + MARKDOWN.len();
        let has_anchor = word[len..].starts_with('#');
        Some(if has_anchor { word.trim_end_matches('.') } else { &word[..len] })
    })
}

/// Returns the anchors that GitHub generates for the headings in a Markdown text: lower case,
/// without punctuation, with hyphens for spaces. A repeated anchor is followed by a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut counts = BTreeMap::new();
    let mut is_code = false;
    let mut anchors = BTreeSet::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        let title = line.trim_start_matches('#');
        if is_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let anchor: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter_map(|next| match next {
                ' ' => Some('-'),
                next if next.is_alphanumeric() || next == '-' || next == '_' => Some(next),
                _ => None,
            })
            .collect();
        let count = counts.entry(anchor.clone()).or_insert(0u32);
        anchors.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    anchors
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// Replaces `DOCS` with the folder of the documents. The check also reads this file, so no test
    /// string may look like a document's path.
    fn text(template: &str) -> String {
        template.replace("DOCS/", DOCS)
    }

    #[test]
    fn anchors_are_made_as_github_makes_them() {
        let text = "# One, `two`\n\n```\n# a comment\n```\n## One two\n## One two\n#no heading\n";
        let expected = ["one-two", "one-two-1", "one-two-2"].map(str::to_owned);
        assert_eq!(anchors(text), BTreeSet::from(expected));
    }

    #[test]
    fn mentions_include_anchors_and_exclude_other_paths() {
        let line =
            &text("see (DOCS/a.md#b-c), DOCS/d/e.md. Not Documentation/DOCS/f.md or DOCS/ alone");
        assert_eq!(
            mentions(line).collect::<Vec<_>>(),
            [text("DOCS/a.md#b-c"), text("DOCS/d/e.md")]
        );
    }

    #[test]
    fn dangling_references_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("docs").join("sub")).unwrap();
        let document = "# Here\n[b](b.md) [c](#here) [d](#there) [web](https://x/y.md)\n";
        fs::write(root.join("docs").join("a.md"), document).unwrap();
        let other = "[a](../a.md#here) [b](../a.md#there) [c](a.md)\n";
        fs::write(root.join("docs/sub").join("c.md"), other).unwrap();
        let code = [INCLUDES[0], "e.rs\") ", INCLUDES[1], "f.txt\")"].concat();
        let code = text("// DOCS/a.md#here\n// DOCS/f.md\n") + &code;
        fs::write(root.join("e.rs"), code).unwrap();
        let status = Command::new("git").arg("-C").arg(root).arg("init").output().unwrap().status;
        assert!(status.success());
        let found = unresolved(&Repository::at(root)).unwrap();
        let expected = [
            "DOCS/a.md:2: no such file: b.md",
            "DOCS/a.md:2: no such heading: #there",
            "DOCS/sub/c.md:1: no such heading: ../a.md#there",
            "DOCS/sub/c.md:1: no such file: a.md",
            "e.rs:2: no such file: DOCS/f.md",
            "e.rs:3: no such file: f.txt",
        ];
        assert_eq!(found, expected.map(text));
    }
}
