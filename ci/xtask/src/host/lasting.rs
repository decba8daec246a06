//! Files that stay from boot to boot: a disk and an NVDIMM.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::checkout::{create_folder, remove_file, rename};
use crate::jobs;
use crate::programs;

/// Size of a disk that is made for `--disk`.
pub(super) const DISK_MIB: u64 = 512;
/// Size of an NVDIMM that is made for `--nvdimm-file`.
pub(super) const NVDIMM_FILE_MIB: u64 = 256;

/// Makes a file with an ext4 file system, unless the file exists.
pub(super) fn make(file: &Path, size_mib: u64) -> Result<()> {
    if file.exists() {
        return Ok(());
    }
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        create_folder(folder)?;
    }
    let mut name = file.file_name().context("not a file's name")?.to_owned();
    name.push(".new");
    let new: PathBuf = file.with_file_name(name);
    remove_file(&new)?;
    let mut mke2fs = programs::system("mke2fs");
    let options = "-q -t ext4 -b 4096 -m 0 -E lazy_itable_init=0,root_owner=0:0";
    mke2fs.args(options.split(' '));
    mke2fs.arg(&new).arg(format!("{size_mib}M"));
    jobs::run(mke2fs.stdout(Stdio::null()))?;
    rename(&new, file)
}
