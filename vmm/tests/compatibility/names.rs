//! Names of Cloud Hypervisor's flags, keys, calls and fields.

const NAMES: &str = include_str!("cloud-hypervisor-0.3.0.names");

/// Sample values for a flag, key or field.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Samples {
    /// Default value, if it can be written out.
    pub default: Option<&'static str>,
    /// Value other than the default.
    pub other: &'static str,
}

/// Names of one kind (`call`, `field`, `flag` or `key`) with the text after the `=`. For a call,
/// the text contains the success statuses in its description. Otherwise it contains sample values.
pub(crate) fn of_kind(kind: &str) -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    NAMES.lines().filter_map(move |line| {
        let name = line.strip_prefix(kind)?.strip_prefix(' ')?;
        Some(name.split_once(" = ").map_or((name, None), |(name, samples)| (name, Some(samples))))
    })
}

/// Parses `DEFAULT | OTHER`, in which `-` means that the key has no default.
pub(crate) fn samples(text: &'static str) -> Samples {
    let (default, other) =
        text.split_once(" | ").unwrap_or_else(|| panic!("{text:?} is not DEFAULT | OTHER"));
    Samples { default: Some(default).filter(|default| *default != "-"), other }
}

#[test]
fn names_are_sorted_and_unique() {
    let names: Vec<_> = NAMES.lines().map(|line| line.split(" = ").next().unwrap()).collect();
    // Because the list is sorted, a merge conflict is resolved by keeping both lines.
    assert!(names.is_sorted_by(|one, next| one < next), "sort them, each once");
}
