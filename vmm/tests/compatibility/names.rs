//! What Cloud Hypervisor has, by name.

const NAMES: &str = include_str!("cloud-hypervisor-0.3.0.names");

/// Values to try a name with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Samples {
    /// What it is when nothing is said, where that can be written out.
    pub default: Option<&'static str>,
    /// Something else.
    pub other: &'static str,
}

/// The names of one kind (`call`, `field`, `flag`, `key`), with what is behind the `=`: values to
/// try it with, and of a call the statuses of its description that are no errors.
pub(crate) fn of_kind(kind: &str) -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    NAMES.lines().filter_map(move |line| {
        let name = line.strip_prefix(kind)?.strip_prefix(' ')?;
        Some(name.split_once(" = ").map_or((name, None), |(name, samples)| (name, Some(samples))))
    })
}

/// `DEFAULT | OTHER`, with `-` for none.
pub(crate) fn samples(text: &'static str) -> Samples {
    let (default, other) =
        text.split_once(" | ").unwrap_or_else(|| panic!("{text:?} is not DEFAULT | OTHER"));
    Samples { default: Some(default).filter(|default| *default != "-"), other }
}

#[test]
fn names_are_sorted_and_told_once() {
    let names: Vec<_> = NAMES.lines().map(|line| line.split(" = ").next().unwrap()).collect();
    // A conflict of two changes is then easily mended: both lines stay.
    assert!(names.is_sorted_by(|one, next| one < next), "sort them, each once");
}
