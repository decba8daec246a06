//! Suggestions for mistyped names, by the measure that clap uses for flags: the Jaro similarity.

use std::ops::RangeInclusive;

/// Smallest similarity of a suggestion, from 0 to 1. The value is that of clap (`did_you_mean` in
/// src/parser/features/suggestions.rs).
const MIN_SIMILARITY: f64 = 0.7;
/// Lengths of compared texts, in bytes. A single letter is similar to every short name with that
/// letter, and clients may send very long keys.
const COMPARED_BYTES: RangeInclusive<usize> = 2..=64;

/// Returns a clause for an error about `text`, with the most similar of `names`. The clause is
/// empty if no name is similar.
pub fn suggestion<'a>(text: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let similar = most_similar(text, names);
    similar.map_or_else(String::new, |name| format!(" (did you mean '{name}'?)"))
}

/// Returns the name that is most similar to `text`, if one is. The `=` behind the name of a key is
/// not compared.
pub fn most_similar<'a>(text: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if !COMPARED_BYTES.contains(&text.len()) {
        return None;
    }
    let names: Vec<_> = names.into_iter().collect();
    // A text that equals a name is not mistyped, for example `tty` in `tty=1`.
    if names.contains(&text) {
        return None;
    }
    let similarity = |name: &str| strsim::jaro(text, name.trim_end_matches('='));
    let names = names.into_iter().map(|name| (similarity(name), name));
    let similar = names.filter(|(similarity, _)| *similarity > MIN_SIMILARITY);
    similar.max_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, name)| name)
}

/// Returns the clause of [`suggestion`] for a list of names as an error shows it. Lists are
/// separated by semicolons, and a title may precede a list.
pub fn suggestion_from_list(text: &str, list: &str) -> String {
    suggestion(text, list.split([',', ';', ':']).map(str::trim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_similar_name_is_suggested() {
        let suggested =
            |text: &str| suggestion(text, ["size=", "shared=", "hugepages=", "tty", "pty"]);
        assert_eq!(suggested("sise"), " (did you mean 'size='?)");
        assert_eq!(suggested("hugepage"), " (did you mean 'hugepages='?)");
        assert_eq!(suggested("ptty"), " (did you mean 'pty'?)");
        for text in ["", "7", "p", "pty", "tty", "1Q", "frobnicate", &"size".repeat(1 << 20)] {
            assert_eq!(suggested(text), "", "{text:.10}");
        }
    }

    #[test]
    fn names_of_all_lists_are_suggested() {
        let list = "burst, horizon; parameters of the rules: floor, ceiling";
        assert_eq!(suggestion_from_list("horizn", list), " (did you mean 'horizon'?)");
        assert_eq!(suggestion_from_list("flor", list), " (did you mean 'floor'?)");
        assert_eq!(suggestion_from_list("moon", "none"), "");
    }
}
