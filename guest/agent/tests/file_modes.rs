//! Tests the modes of the files that the agent creates.

#[path = "../../../pmem-volume/pmvol/tests/shell/umask.rs"]
mod umask;

#[test]
fn files_are_private_at_every_umask() {
    umask::check(env!("CARGO_BIN_EXE_foreshore-agent"));
}
