//! Recognizes a Foreshore guest. On any other machine, the agent changes nothing.

use std::fs;
use std::path::Path;

use foreshore_proto::ACPI_OEM_ID;

use crate::args::Options;

/// ACPI table that every VM has. Only root can read it (drivers/acpi/sysfs.c).
const FADT: &str = "firmware/acpi/tables/FACP";

/// Offset of the OEM ID in an ACPI table (ACPI 6.5, 5.2.6).
const OEM_ID_OFFSET: usize = 10;

/// Checks the ACPI tables. They are valid even before the VMM accepts reports, and memory that the
/// VMM plugs that early must also come online.
///
/// Returns the reason if the machine is not recognized as a guest.
fn check_is_foreshore_guest(sys: &Path) -> Result<(), String> {
    let path = sys.join(FADT);
    let table = fs::read(&path)
        .map_err(|error| format!("Cannot recognize the machine by {}: {error}", path.display()))?;
    let is_foreshore =
        table.get(OEM_ID_OFFSET..).is_some_and(|rest| rest.starts_with(&ACPI_OEM_ID));
    is_foreshore.then_some(()).ok_or_else(|| "This is not a guest of Foreshore (ACPI)".to_owned())
}

/// Returns `options`. On a machine that is not a Foreshore guest, turns off every feature that
/// changes the machine. `sys` is /sys outside of tests.
pub(crate) fn permitted(options: &Options, sys: &Path) -> Options {
    match check_is_foreshore_guest(sys) {
        Ok(()) => options.clone(),
        Err(reason) => {
            eprintln!("foreshore-agent: {reason}; no settings are changed");
            options.reporting_only()
        }
    }
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

    #[test]
    fn reason_distinguishes_another_machine_from_an_unreadable_table() {
        let tree = Tree::new(&[]);
        let reason = check_is_foreshore_guest(&tree.at("sys")).unwrap_err();
        assert!(reason.starts_with("Cannot recognize the machine by"), "{reason}");
        tree.put(&format!("sys/{FADT}"), "FACP");
        assert_eq!(
            check_is_foreshore_guest(&tree.at("sys")).unwrap_err(),
            "This is not a guest of Foreshore (ACPI)"
        );
    }
}
