//! Damages files for tests.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) fn overwrite(path: &Path, offset_bytes: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset_bytes).unwrap();
}
