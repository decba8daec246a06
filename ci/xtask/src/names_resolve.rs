//! Check of the names by which files refer to documents and to included files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use crate::repository::Repository;

/// Folder of the documents. Other files name a document by its path from the root.
const DOCS: &str = "docs/";
const MARKDOWN: &str = ".md";
const INCLUDES: [&str; 2] = ["include_str!(\"", "include_bytes!(\""];

#[derive(Debug, PartialEq, Eq)]
struct Reference {
    line: usize,
    text: String,
    path: PathBuf,
    anchor: Option<String>,
}

/// References in the repository's text files to missing files and headings.
pub(crate) fn unresolved(repository: &Repository) -> Result<Vec<String>> {
    let mut texts = BTreeMap::new();
    for path in repository.files()? {
        if let Some(text) = repository.read(&path)? {
            texts.insert(path, text);
        }
    }
    let headings: BTreeMap<_, _> = texts
        .iter()
        .filter(|(path, _)| path.ends_with(MARKDOWN))
        .map(|(path, text)| (PathBuf::from(path), anchors(text)))
        .collect();
    let mut unresolved = Vec::new();
    for (file, text) in &texts {
        for Reference { line, text, path, anchor } in references(file, text) {
            let has_heading =
                |anchor| headings.get(&path).is_some_and(|known| known.contains(anchor));
            let kind = match &anchor {
                _ if !repository.exists(&path) => "file",
                Some(anchor) if !has_heading(anchor) => "heading",
                _ => continue,
            };
            unresolved.push(format!("{file}:{line}: no such {kind}: {text}"));
        }
    }
    Ok(unresolved)
}

fn references(file: &str, text: &str) -> Vec<Reference> {
    let folder = Path::new(file).parent().unwrap_or(Path::new(""));
    let mut references = Vec::new();
    let mut add = |line, text: &str, folder: &Path| {
        let (path, anchor) = match text.split_once('#') {
            Some((path, anchor)) => (path, Some(anchor.to_owned())),
            None => (text, None),
        };
        let path = if path.is_empty() { PathBuf::from(file) } else { normal(&folder.join(path)) };
        references.push(Reference { line, text: text.to_owned(), path, anchor });
    };
    for (line, content) in (1..).zip(text.lines()) {
        let is_markdown = file.ends_with(MARKDOWN);
        if is_markdown {
            links(content).for_each(|link| add(line, link, folder));
        }
        if file.ends_with(".rs") {
            INCLUDES.iter().for_each(|start| {
                let included =
                    content.split(start).skip(1).filter_map(|rest| rest.split('"').next());
                included.for_each(|path| add(line, path, folder));
            });
        }
        // A link's text may name another document in full.
        mentions(content).for_each(|mention| add(line, mention, Path::new("")));
    }
    references
}

/// Targets of the Markdown links in a line, except those of the web.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://") && !target.contains(char::is_whitespace))
}

/// Paths of documents in a line, with their anchors.
fn mentions(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices(DOCS).filter_map(|(start, _)| {
        let before = line[..start].chars().next_back();
        // The end of another path, for example of the kernel's or of a link.
        if before.is_some_and(|before| before.is_alphanumeric() || "/._-".contains(before)) {
            return None;
        }
        let rest = &line[start..];
        let len = rest.find(MARKDOWN)? + MARKDOWN.len();
        if !rest[..len].chars().all(is_path_char) {
            return None;
        }
        let anchor = rest[len..].strip_prefix('#').map_or(0, |anchor| {
            1 + anchor
                .find(|next: char| !next.is_alphanumeric() && next != '-' && next != '_')
                .unwrap_or(anchor.len())
        });
        Some(&rest[..len + anchor])
    })
}

fn is_path_char(character: char) -> bool {
    character.is_ascii_alphanumeric() || "/._-".contains(character)
}

/// Removes `.` and `..` without looking at the file system.
fn normal(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut normal, component| {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            other => normal.push(other),
        }
        normal
    })
}

/// Anchors of the headings in a Markdown text, as GitHub makes them: lower case, without
/// punctuation, hyphens for spaces, and a number after an anchor that occurs again.
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

    /// Puts the folder of the documents in place of `DOCS`. The check also reads this file, so no
    /// name here may look like a document's.
    fn text(template: &str) -> String {
        template.replace("DOCS/", DOCS)
    }

    fn shown(found: &Reference) -> String {
        found.path.display().to_string()
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
    fn references_are_relative_to_their_file() {
        let found =
            references(&text("DOCS/a/b.md"), "[c](../c.md#d) [web](https://x/y.md) [here](#e)\n");
        let found: Vec<_> =
            found.iter().map(|found| (shown(found), found.anchor.as_deref())).collect();
        assert_eq!(found, [(text("DOCS/c.md"), Some("d")), (text("DOCS/a/b.md"), Some("e"))]);
        let found = references(
            "x/src/a.rs",
            &text("const A: &str = include_str!(\"../b.txt\"); // DOCS/c.md"),
        );
        let found: Vec<_> = found.iter().map(shown).collect();
        assert_eq!(found, ["x/b.txt".to_owned(), text("DOCS/c.md")]);
    }

    #[test]
    fn dangling_references_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir(root.join("docs")).unwrap();
        fs::write(root.join("docs").join("a.md"), "# Here\n[b](b.md) [c](#here) [d](#there)\n")
            .unwrap();
        fs::write(root.join("e.rs"), text("// DOCS/a.md#here\n// DOCS/f.md\n")).unwrap();
        let status = Command::new("git").arg("-C").arg(root).arg("init").output().unwrap().status;
        assert!(status.success());
        let found = unresolved(&Repository::at(root)).unwrap();
        let expected = [
            "DOCS/a.md:2: no such file: b.md",
            "DOCS/a.md:2: no such heading: #there",
            "e.rs:2: no such file: DOCS/f.md",
        ];
        let expected = expected.map(text);
        assert_eq!(found, expected);
    }
}
