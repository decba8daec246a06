//! Recognition of a Foreshore guest. The agent changes nothing on any other machine.

use std::fs;
use std::path::Path;

use foreshore_proto::ACPI_OEM_ID;

use crate::args::Options;

/// ACPI table that every VM has. Linux shows it to root only (drivers/acpi/sysfs.c).
const FADT: &str = "firmware/acpi/tables/FACP";

/// Offset of the OEM ID in a table (ACPI 6.5, 5.2.6).
const OEM_ID_OFFSET: usize = 10;

/// Checks the ACPI tables, which do not depend on the VMM's readiness: memory that a VM plugs
/// before the VMM accepts reports must come online as well.
fn is_ours(sys: &Path) -> bool {
    let table = fs::read(sys.join(FADT)).unwrap_or_default();
    table.get(OEM_ID_OFFSET..).is_some_and(|rest| rest.starts_with(&ACPI_OEM_ID))
}

/// Returns `options`, without the parts that change the machine unless it is a guest of Foreshore.
/// `sys` is /sys outside of tests.
pub(crate) fn permitted(options: &Options, sys: &Path) -> Options {
    if is_ours(sys) {
        return options.clone();
    }
    eprintln!("foreshore-agent: This is not a guest of Foreshore (ACPI): no settings are changed");
    options.reporting_only()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{self, Command};
    use crate::tree::Tree;

    fn options(line: &str) -> Options {
        match args::parse(line.split_whitespace().map(Into::into)) {
            Ok(Command::Run(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn machine_is_changed_only_if_its_acpi_tables_are_ours() {
        let header = |oem_id: &str| format!("FACP\u{14}\u{1}\0\0\u{6}\u{7f}{oem_id}FORESHOR");
        let table = format!("sys/{FADT}");
        let all = options("--port 7");
        let nothing = options(
            "--port 7 --online none --reserve off --kernel-blocks off --tune off --idle off",
        );
        for (text, expected) in [
            (Some(header("FRSHOR")), &all),
            (Some(header("BOCHS ")), &nothing),
            (Some("FACP".to_owned()), &nothing),
            (None, &nothing),
        ] {
            let tree = Tree::new(&[]);
            if let Some(text) = &text {
                tree.put(&table, text);
            }
            assert_eq!(&permitted(&all, &tree.at("sys")), expected, "{text:?}");
        }
    }
}
