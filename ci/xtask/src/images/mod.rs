//! Builds images of the guests and of the emulated host. The images do not depend on the user's
//! settings and programs.
//!
//! Each image has a stamp file next to it with the key of the inputs that it was built from.

pub(crate) mod guests;
pub(crate) mod host;
pub(crate) mod peers;
mod staging;
mod trees;

use std::fs::{self, File};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::checkout::{Checkout, remove_folder, rename, write};
use crate::jobs;
use crate::kernels;
use crate::programs;

/// Source code of this program. Other modules set the umask, the environment and the kernels of
/// images.
const CODE: [&str; 2] = ["ci/xtask/src", "ci/xtask/Cargo.toml"];

/// Returns inputs that all images share: the code that builds them, the kernels and busybox.
fn common_inputs(checkout: &Checkout) -> Result<Vec<PathBuf>> {
    let mut inputs: Vec<_> = CODE.iter().map(|code| checkout.path(code)).collect();
    inputs.extend([checkout.path(kernels::LOCK), programs::find_system("busybox")?]);
    Ok(inputs)
}

/// Names, sizes and modification times of the listed files, and of all files in the listed folders.
/// The text changes if one of them changes.
fn inputs_key(inputs: &[PathBuf]) -> Result<String> {
    let mut find = programs::system("find");
    find.arg("-H").args(inputs).args(["-type", "f", "-printf", "%p %s %T@\\n"]);
    Ok(sorted_lines(&jobs::output(&mut find)?))
}

fn sorted_lines(text: &str) -> String {
    let mut lines: Vec<_> = text.split_inclusive('\n').collect();
    lines.sort_unstable();
    lines.concat()
}

fn file_with(text: &str) -> Result<File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// Runs `build` unless the stamp already contains this key.
fn rebuild(stamp: &Path, key: &str, build: impl FnOnce() -> Result<()>) -> Result<()> {
    if fs::read_to_string(stamp).is_ok_and(|built| built == key) {
        return Ok(());
    }
    build()?;
    write(stamp, key)
}

/// Returns a command that writes the files below `stage` to its output as an archive. All files are
/// owned by root.
fn archive(stage: &Path) -> Result<Command> {
    let names = jobs::output(programs::system("find").arg(".").current_dir(stage))?;
    let mut cpio = programs::system("cpio");
    cpio.args(["-o", "-H", "newc", "-R", "0:0", "--quiet"])
        .current_dir(stage)
        .stdin(file_with(&sorted_lines(&names))?);
    Ok(cpio)
}

/// Creates an ext4 image of the files below `stage`, for read-only mounts. Blocks without data are
/// holes in the image file.
fn make_file_system(stage: &Path, image: &Path, size: impl FnOnce(u64) -> u64) -> Result<()> {
    let used = jobs::output(programs::system("du").arg("-sk").arg(stage))?;
    let used_kib: u64 =
        used.split('\t').next().unwrap_or_default().parse().context("du printed no size")?;
    let new = image.with_extension("new");
    crate::checkout::remove_file(&new)?;
    let mut mke2fs = programs::system("mke2fs");
    mke2fs.args("-q -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d".split(' '));
    mke2fs.arg(stage).arg(&new).arg(format!("{}k", size(used_kib)));
    jobs::run(mke2fs.stdout(Stdio::null()))?;
    rename(&new, image)?;
    remove_folder(stage)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn key_changes_with_a_time_stamp_a_size_and_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let set_time = |seconds| {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            File::options().append(true).open(&file).unwrap().set_modified(time).unwrap();
        };
        let key = || inputs_key(&[folder.path().to_owned()]).unwrap();
        fs::write(&file, "one").unwrap();
        set_time(1);
        let first = key();
        set_time(2);
        let touched = key();
        fs::write(&file, "three").unwrap();
        set_time(2);
        let longer = key();
        set_time(1);
        fs::write(&file, "one").unwrap();
        set_time(1);
        assert_eq!(key(), first);
        fs::rename(&file, folder.path().join("other")).unwrap();
        let renamed = key();
        let keys = std::collections::BTreeSet::from([first, touched, longer, renamed]);
        assert_eq!(keys.len(), 4);
    }

    #[test]
    fn all_code_of_this_program_is_an_input() {
        let checkout = Checkout::new().unwrap();
        if programs::find_system("busybox").is_err() {
            eprintln!("skipped: busybox is not installed (ci/setup installs it)");
            return;
        }
        let peers = peers::inputs(&checkout, Path::new("/usr/bin/qemu-system-x86_64")).unwrap();
        for inputs in [common_inputs(&checkout).unwrap(), peers] {
            for file in ["src/main.rs", "src/programs.rs", "src/images/staging.rs", "Cargo.toml"] {
                let path = checkout.path("ci/xtask").join(file);
                assert!(
                    path.is_file() && inputs.iter().any(|input| path.starts_with(input)),
                    "{file}"
                );
            }
        }
    }

    #[test]
    fn missing_input_is_an_error() {
        inputs_key(&[PathBuf::from("/nonexistent/input")]).unwrap_err();
    }
}
