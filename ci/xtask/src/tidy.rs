//! Checks rules that the compiler and lints cannot express: length of files, width of lines, and
//! direction of layers.

mod layers;

use anyhow::Result;

use crate::repository::Repository;

/// Maximum number of lines in a Rust file.
const MAX_LINES: usize = 800;
/// Maximum number of columns in a comment line. rustfmt.toml has the same limit for code.
const MAX_COLUMNS: usize = 100;

/// First lines of tables in which each comment is data and must fit on one line.
const TABLES: [&str; 2] = ["params! {", "reasons! {"];

/// Returns violations of the rules, with file and line.
pub(crate) fn violations(repository: &Repository) -> Result<Vec<String>> {
    let sources = sources(repository)?;
    let mut violations: Vec<_> =
        sources.iter().flat_map(|(file, text)| in_text(file, text)).collect();
    violations.extend(layers::violations(repository, &sources)?);
    Ok(violations)
}

/// Returns the layer diagram of the VMM for docs/design/architecture.md.
pub(crate) fn drawing(repository: &Repository) -> Result<String> {
    layers::drawing(repository, &sources(repository)?)
}

fn sources(repository: &Repository) -> Result<Vec<(String, String)>> {
    let mut sources = Vec::new();
    for path in repository.files()? {
        if path.ends_with(".rs")
            && let Some(text) = repository.read(&path)?
        {
            sources.push((path, text));
        }
    }
    Ok(sources)
}

fn in_text(file: &str, text: &str) -> Vec<String> {
    let lines = text.lines().count();
    let too_long = (lines > MAX_LINES)
        .then(|| format!("{file}:{lines}: {lines} lines, and {MAX_LINES} is the limit"));
    let mut is_table = false;
    let too_wide = text.lines().zip(1..).filter_map(|(text, line)| {
        is_table = if is_table { text != "}" } else { TABLES.contains(&text) };
        let columns = text.chars().count();
        let is_too_wide = columns > MAX_COLUMNS && is_prose(text) && !is_table;
        is_too_wide
            .then(|| format!("{file}:{line}: {columns} characters, and {MAX_COLUMNS} is the limit"))
    });
    too_long.into_iter().chain(too_wide).collect()
}

/// Returns true for a comment that can be wrapped, unlike a table row or a line of a drawing.
/// rustfmt checks the width of code.
fn is_prose(line: &str) -> bool {
    let Some(comment) = line.trim_start().strip_prefix("//") else { return false };
    let comment = comment.trim_start_matches(['/', '!']).trim_start();
    let is_drawn = comment.starts_with('|') || comment.contains(['─', '►']);
    !is_drawn && comment.split_whitespace().nth(1).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_wide_lines_are_named() {
        assert_eq!(in_text("a.rs", &"line\n".repeat(800)), Vec::<String>::new());
        assert_eq!(
            in_text("a.rs", &"line\n".repeat(801)),
            ["a.rs:801: 801 lines, and 800 is the limit"]
        );
        let wide = format!("fn a() {{}}\n// {}\n// {}\n", "ä ".repeat(48), "ä ".repeat(49));
        assert_eq!(in_text("a.rs", &wide), ["a.rs:3: 101 characters, and 100 is the limit"]);
        let table = format!("params! {{\n    /// {0}\n}}\n/// {0}\n", "x ".repeat(50));
        assert_eq!(in_text("a.rs", &table), ["a.rs:4: 104 characters, and 100 is the limit"]);
        let exempt = format!(
            "/// {0}\n    //! | {1} |\nlet a = \"{1}\";\n",
            "x".repeat(200),
            "x ".repeat(99)
        );
        assert_eq!(in_text("a.rs", &exempt), Vec::<String>::new());
    }
}
