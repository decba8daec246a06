//! Compares the tokens of Rust files.
//!
//! Comments and doc attributes are not compared. If a commit changes only wording, the differences
//! are string literals. Help texts that clap takes from doc comments are not compared.

use std::str::FromStr;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use similar::{Algorithm, DiffTag, capture_diff_slices};

use crate::repository::Repository;

const SHOWN_TOKENS: usize = 12;

struct Token {
    text: String,
    line: usize,
}

/// Returns all differences between the Rust files in `base` and in the work tree.
pub(crate) fn differences(repository: &Repository, base: &str) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    for file in repository.changed_rust_files(base)? {
        match file {
            (Some(old), Some(new)) => {
                let old = tokens(&old, &repository.read_at(base, &old)?)?;
                let text = repository.read(&new)?.ok_or_else(|| anyhow!("{new} is not UTF-8"))?;
                differences.extend(compare(&new, &old, &tokens(&new, &text)?));
            }
            (None, Some(path)) => differences.push(format!("{path}: new file")),
            (Some(path), None) => differences.push(format!("{path}: removed")),
            (None, None) => {}
        }
    }
    Ok(differences)
}

fn compare(path: &str, old: &[Token], new: &[Token]) -> Vec<String> {
    let texts =
        |tokens: &[Token]| tokens.iter().map(|token| token.text.clone()).collect::<Vec<_>>();
    let (old_texts, new_texts) = (texts(old), texts(new));
    let shown = |texts: &[String]| {
        let more = if texts.len() > SHOWN_TOKENS { " ..." } else { "" };
        format!("{}{more}", texts[..texts.len().min(SHOWN_TOKENS)].join(" "))
    };
    let changes = capture_diff_slices(Algorithm::Myers, &old_texts, &new_texts);
    let changes = changes.iter().filter(|change| change.tag() != DiffTag::Equal);
    changes
        .map(|change| {
            let line = new.get(change.new_range().start).or(new.last());
            let line = line.map_or(1, |token| token.line);
            let (old, new) =
                (shown(&old_texts[change.old_range()]), shown(&new_texts[change.new_range()]));
            format!("{path}:{line}:\n  - {old}\n  + {new}")
        })
        .collect()
}

fn tokens(path: &str, text: &str) -> Result<Vec<Token>> {
    let stream = TokenStream::from_str(text)
        .map_err(|error| anyhow!("{path}:{}: {error}", error.span().start().line))?;
    let mut tokens = Vec::new();
    flatten(stream, &mut tokens);
    Ok(tokens)
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    let mut trees = stream.into_iter().peekable();
    // The lexer splits `&&` into two marks and marks the first one as joint. `& &` has no joint
    // mark.
    let mut is_joint = false;
    while let Some(tree) = trees.next() {
        let continues = std::mem::take(&mut is_joint);
        let line = tree.span().start().line;
        match tree {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                let is_inner =
                    matches!(trees.peek(), Some(TokenTree::Punct(next)) if next.as_char() == '!');
                let bang = is_inner.then(|| trees.next()).flatten();
                if trees.next_if(is_doc).is_none() {
                    tokens.push(Token { text: "#".to_owned(), line });
                    tokens.extend(bang.map(|_| Token { text: "!".to_owned(), line }));
                }
            }
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                tokens.push(Token { text: open.to_owned(), line });
                flatten(group.stream(), tokens);
                let line = group.span_close().start().line;
                tokens.push(Token { text: close.to_owned(), line });
            }
            TokenTree::Punct(punct) => {
                is_joint = punct.spacing() == Spacing::Joint;
                match tokens.last_mut().filter(|_| continues) {
                    Some(operator) => operator.text.push(punct.as_char()),
                    None => tokens.push(Token { text: punct.as_char().to_string(), line }),
                }
            }
            other => tokens.push(Token { text: other.to_string(), line }),
        }
    }
}

/// Returns true for the brackets of `#[doc = ...]`. The lexer turns doc comments into such
/// attributes.
fn is_doc(tree: &TokenTree) -> bool {
    let TokenTree::Group(group) = tree else { return false };
    let mut inner = group.stream().into_iter();
    group.delimiter() == Delimiter::Bracket
        && matches!(inner.next(), Some(TokenTree::Ident(name)) if name == "doc")
        && matches!(inner.next(), Some(TokenTree::Punct(sign)) if sign.as_char() == '=')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differences_of(old: &str, new: &str) -> Vec<String> {
        compare("f.rs", &tokens("f.rs", old).unwrap(), &tokens("f.rs", new).unwrap())
    }

    #[test]
    fn comments_and_layout_do_not_count() {
        let old = "//! A file.\n/// One.\n#[inline]\nfn f(a: u8) -> u8 { a /* here */ + 1 }\n";
        let new =
            "//! Another.\n\n#[inline]\n// Plain.\nfn f(\n    a: u8\n) -> u8 {\n    a + 1\n}\n";
        assert!(differences_of(old, new).is_empty());
    }

    #[test]
    fn changed_string_operator_and_attribute_are_found() {
        let found = differences_of("fn f() {\n g(\"a\")\n}", "fn f() {\n\n g(\"b\")\n}");
        assert_eq!(found, ["f.rs:3:\n  - \"a\"\n  + \"b\""]);
        for (old, new) in [
            ("const A: u8 = 1 + 2;", "const A: u8 = 1 - 2;"),
            ("const A: bool = B && C;", "const A: bool = B & &C;"),
            ("#[inline] fn f() {}", "fn f() {}"),
            ("#[doc(hidden)] fn f() {}", "fn f() {}"),
            ("#![no_std]", "#[no_std]"),
            ("fn f() {}", "fn f() {} fn g() {}"),
            ("fn f() {}", ""),
        ] {
            assert_eq!(differences_of(old, new).len(), 1, "{old} {new}");
        }
    }

    #[test]
    fn invalid_rust_is_reported_with_its_line() {
        let error = tokens("f.rs", "fn f() {\n  (]\n}").err().unwrap().to_string();
        assert!(error.starts_with("f.rs:2:"), "{error}");
    }
}
