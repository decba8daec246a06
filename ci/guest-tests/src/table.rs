//! Table of the guest tests: kernels, vCPUs and class of each test.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Kernel;

/// Row of the table of tests. The row is one test for each of its variants.
#[derive(Clone, Copy)]
pub struct Row {
    /// Name of the program, the topic and the test, separated by `::`.
    pub name: &'static str,
    pub run: fn() -> Result<()>,
    pub limit: Duration,
    pub variants: &'static [Variant],
    pub vcpus: Vcpus,
}

/// Kernels of a test's guests, and the class of the test.
#[derive(Clone, Copy)]
pub struct Variant {
    /// Empty if the test boots no kernel.
    pub kernels: &'static [Kernel],
    pub class: Class,
}

/// Number of vCPUs with which the guests of a test boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vcpus {
    Each(u32),
    /// The number changes, or differs between the guests.
    Several,
}

impl fmt::Display for Vcpus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each(number) => write!(formatter, "{number}"),
            Self::Several => formatter.write_str("several"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Usual,
    /// Test that runs in CI but takes long for what it adds.
    Long,
    /// Test that runs rarely, because other tests show the same in less time.
    Extended,
}

impl fmt::Display for Class {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Usual => "usual",
            Self::Long => "long",
            Self::Extended => "extended",
        })
    }
}

/// One variant of a row.
#[derive(Clone)]
pub(crate) struct Test {
    /// Name in the form `topic::what_holds`. If the row has several variants, it ends in `_on_` and
    /// the kernel.
    pub name: String,
    pub row: Row,
    pub variant: Variant,
}

impl Row {
    /// Returns the name without the program's name, for example `boot::boots`.
    fn short_name(&self) -> &'static str {
        self.name.split_once("::").map_or(self.name, |(_, name)| name)
    }

    pub(crate) fn tests(&self) -> impl Iterator<Item = Test> {
        self.variants.iter().map(|variant| {
            let mut name = self.short_name().to_owned();
            if self.variants.len() > 1 {
                let kernels = kernels_text(variant.kernels, "_and_");
                name = format!("{name}_on_{}", kernels.replace(['.', '-'], "_"));
            }
            Test { name, row: *self, variant: *variant }
        })
    }
}

fn kernels_text(kernels: &[Kernel], separator: &str) -> String {
    let kernels: Vec<_> = kernels.iter().map(Kernel::to_string).collect();
    if kernels.is_empty() { "none".to_owned() } else { kernels.join(separator) }
}

/// Default time limit of a test. It is ten times the usual time under emulation.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(120);

/// Defines the table of a module's tests. A row consists of a test's name and of these columns, in
/// this order. Each may be omitted:
///
/// | Column | Content | Default |
/// |---|---|---|
/// | `: 300` | Time limit in seconds | [`DEFAULT_LIMIT`] |
/// | `(long)` | Class | usual |
/// | `on [V6_12, V6_1 extended]` | Kernels, each with its own test, which may have its own class | `[V6_12]` |
/// | `x 2` | Number of vCPUs | 1 |
/// | `=> call()` | Call that runs the test | function of the same name |
///
/// If the guests of one test have different kernels, the column is `on [V6_12 & V6_1]`, and if the
/// number of vCPUs differs or changes, it is `x several`. `on none` marks a test that boots no
/// kernel. [`Guest::builder`](crate::Guest::builder) starts with the kernel and the vCPUs of the
/// row, and a guest that is not of the row is an error.
///
/// ```ignore
/// tests![
///     boots on [V6_12, V6_1 long],
///     survives_a_kill: 300 (long) on [V6_12, V6_1 extended] x 2 => survives("nvdimm"),
///     vcpus_come_and_go: 400 x several,
/// ]
/// ```
///
/// `long` is for tests that take 15 s or more under emulation, and for a kernel on which another
/// test already shows nearly the same. `extended` is for tests that CI does not need, because other
/// tests show the same.
#[macro_export]
macro_rules! tests {
    (@class) => { $crate::table::Class::Usual };
    (@class long) => { $crate::table::Class::Long };
    (@class extended) => { $crate::table::Class::Extended };
    (@class ($($row:ident)?)) => { $crate::tests!(@class $($row)?) };
    (@class ($($row:ident)?) $own:ident) => { $crate::tests!(@class $own) };
    (@variants $class:tt) => { $crate::tests!(@variants $class [V6_12]) };
    (@variants $class:tt none) => {
        &[$crate::table::Variant { kernels: &[], class: $crate::tests!(@class $class) }]
    };
    (@variants $class:tt [$($($kernel:ident)&+ $($own:ident)?),+]) => {
        &[$($crate::table::Variant {
            kernels: &[$($crate::Kernel::$kernel),+],
            class: $crate::tests!(@class $class $($own)?),
        }),+]
    };
    (@vcpus) => { $crate::table::Vcpus::Each(1) };
    (@vcpus several) => { $crate::table::Vcpus::Several };
    (@vcpus $number:literal) => { $crate::table::Vcpus::Each($number) };
    (@run $name:ident) => { $name };
    (@run $name:ident $run:expr) => { || $run };
    ($(
        $name:ident $(: $seconds:literal)? $(($class:ident))?
        $(on $kernels:tt)? $(x $vcpus:tt)? $(=> $run:expr)?
    ),+ $(,)?) => {
        pub(crate) const TESTS: &[$crate::table::Row] = &[$(
            $crate::table::Row {
                name: concat!(module_path!(), "::", stringify!($name)),
                run: $crate::tests!(@run $name $($run)?),
                limit: {
                    let limit = $crate::table::DEFAULT_LIMIT;
                    $(let limit = { let _ = limit; std::time::Duration::from_secs($seconds) };)?
                    limit
                },
                variants: $crate::tests!(@variants ($($class)?) $($kernels)?),
                vcpus: $crate::tests!(@vcpus $($vcpus)?),
            },
        )+];
    };
}

/// Test that this process runs. The test is not set in other programs that boot guests.
static THIS_TEST: OnceLock<Test> = OnceLock::new();

/// Makes `test` the one that this process runs.
pub(crate) fn begin_test(test: Test) -> &'static Test {
    THIS_TEST.get_or_init(|| test)
}

/// Returns true if this process runs a guest test.
pub(crate) fn is_test() -> bool {
    THIS_TEST.get().is_some()
}

/// Returns the kernel of this test's row, or the first of them.
pub fn this_tests_kernel() -> Kernel {
    let test = THIS_TEST.get();
    test.and_then(|test| test.variant.kernels.first().copied()).unwrap_or(Kernel::V6_12)
}

/// Returns the number of vCPUs in this test's row, or 1 if there are several.
pub(crate) fn this_tests_vcpus() -> u32 {
    match THIS_TEST.get().map(|test| test.row.vcpus) {
        Some(Vcpus::Each(number)) => number,
        Some(Vcpus::Several) | None => 1,
    }
}

/// Fails if a guest with this kernel and these vCPUs is not in this test's row.
pub(crate) fn is_in_this_tests_row(kernel: Kernel, vcpus: u32) -> Result<()> {
    THIS_TEST.get().map_or(Ok(()), |test| test.has_guest(kernel, vcpus))
}

impl Test {
    fn has_guest(&self, kernel: Kernel, vcpus: u32) -> Result<()> {
        let Self { name, row, variant } = self;
        let has_vcpus = row.vcpus == Vcpus::Several || row.vcpus == Vcpus::Each(vcpus);
        ensure!(
            variant.kernels.contains(&kernel) && has_vcpus,
            "a guest on kernel {kernel} with {vcpus} vCPUs is not in the row of {name}, which has \
             kernel {} and {} vCPUs",
            kernels_text(variant.kernels, " and "),
            row.vcpus
        );
        Ok(())
    }
}

const HEADINGS: &str = "KERNEL         VCPUS    CLASS            TEST\n";

/// Returns the table of these tests. It has a line for each row, with the kernels and classes of
/// these tests. `&` joins the kernels of one test.
pub(crate) fn table(tests: &[Test]) -> String {
    let mut text = HEADINGS.to_owned();
    for variants in tests.chunk_by(|one, next| one.row.name == next.row.name) {
        let column = |cell: fn(&Variant) -> String| {
            let mut cells: Vec<_> = variants.iter().map(|test| cell(&test.variant)).collect();
            cells.dedup();
            cells.join(", ")
        };
        let row = &variants[0].row;
        let kernels = column(|variant| kernels_text(variant.kernels, " & "));
        let classes = column(|variant| variant.class.to_string());
        let has_guests = variants.iter().any(|test| !test.variant.kernels.is_empty());
        let vcpus = if has_guests { row.vcpus.to_string() } else { "-".to_owned() };
        text += &format!("{kernels:14} {vcpus:8} {classes:16} {}\n", row.short_name());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes() -> Result<()> {
        Ok(())
    }

    mod rows {
        use super::passes;

        crate::tests![
            one_kernel => passes(),
            two_kernels: 300 (long) on [V6_12, V6_1 extended] x 2 => passes(),
            two_kernels_in_a_class on [V6_12, V6_1] x several => passes(),
            other_kernel (extended) on [V6_12Generic] => passes(),
            two_kernels_at_once (long) on [V6_12 & V6_1] x 4 => passes(),
            no_kernel on none => passes(),
        ];
    }

    fn tests() -> Vec<Test> {
        rows::TESTS.iter().flat_map(Row::tests).collect()
    }

    fn named(name: &str) -> Test {
        let found = tests().into_iter().find(|test| test.name.ends_with(name));
        found.unwrap_or_else(|| panic!("no test {name}"))
    }

    #[test]
    fn row_with_several_kernels_is_a_test_for_each() {
        let tests = tests();
        let names: Vec<_> =
            tests.iter().map(|test| test.name.trim_start_matches("table::tests::rows::")).collect();
        let expected = [
            "one_kernel",
            "two_kernels_on_6_12",
            "two_kernels_on_6_1",
            "two_kernels_in_a_class_on_6_12",
            "two_kernels_in_a_class_on_6_1",
            "other_kernel",
            "two_kernels_at_once",
            "no_kernel",
        ];
        assert_eq!(names, expected);
        assert_eq!(named("two_kernels_on_6_1").row.limit, Duration::from_secs(300));
        assert_eq!(named("one_kernel").row.limit, DEFAULT_LIMIT);
    }

    #[test]
    fn table_has_a_line_for_each_row() {
        let expected = "\
KERNEL         VCPUS    CLASS            TEST
6.12           1        usual            one_kernel
6.12, 6.1      2        long, extended   two_kernels
6.12, 6.1      several  usual            two_kernels_in_a_class
6.12-generic   1        extended         other_kernel
6.12 & 6.1     4        long             two_kernels_at_once
none           -        usual            no_kernel
";
        assert_eq!(table(&tests()).replace("table::tests::rows::", ""), expected);
        // Only chosen variants are listed.
        let line = table(&[named("two_kernels_on_6_1")]);
        let line = line.lines().nth(1).unwrap();
        assert!(line.starts_with("6.1            2        extended  "), "{line}");
    }

    #[test]
    fn guests_that_are_not_in_the_row_are_refused() {
        for (name, kernel, vcpus, is_right) in [
            ("one_kernel", Kernel::V6_12, 1, true),
            ("one_kernel", Kernel::V6_1, 1, false),
            ("two_kernels_on_6_1", Kernel::V6_1, 2, true),
            ("two_kernels_on_6_1", Kernel::V6_12, 2, false),
            ("two_kernels_on_6_1", Kernel::V6_1, 1, false),
            ("two_kernels_in_a_class_on_6_1", Kernel::V6_1, 3, true),
            ("two_kernels_at_once", Kernel::V6_12, 4, true),
            ("two_kernels_at_once", Kernel::V6_1, 4, true),
            ("no_kernel", Kernel::V6_12, 1, false),
        ] {
            assert_eq!(named(name).has_guest(kernel, vcpus).is_ok(), is_right, "{name} {vcpus}");
        }
        let error = named("two_kernels_at_once").has_guest(Kernel::V6_12Generic, 2).unwrap_err();
        let end = "which has kernel 6.12 and 6.1 and 4 vCPUs";
        assert!(error.to_string().ends_with(end), "{error}");
    }
}
