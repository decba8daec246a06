//! Image files: one that appears when it is complete, and qcow2 by qemu-img.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

const QEMU_IMG: &str = "qemu-img";

/// A file that gets its name when it is complete.
pub(super) struct PartFile {
    pub(super) file: File,
    part: PathBuf,
    /// It has its name.
    is_named: bool,
}

impl PartFile {
    /// Makes `FILE.part`. `replace`: there may be a `FILE`.
    pub(super) fn new(path: &Path, replace: bool) -> anyhow::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.is_file() => {
                bail!("{}: it is no regular file, and an image is only written to one", path.display())
            }
            Ok(_) if !replace => bail!("{}: the file exists already; --force replaces it", path.display()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot look at {}", path.display()));
            }
        }
        let part = beside(path, ".part");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(&part).with_context(|| format!("cannot make {}", part.display()))?;
        Ok(Self { file, part, is_named: false })
    }

    /// Makes it durable and gives it its name.
    pub(super) fn name(mut self, path: &Path) -> anyhow::Result<()> {
        let failed = || format!("cannot complete {}", path.display());
        self.file.sync_all().with_context(failed)?;
        fs::rename(&self.part, path).with_context(failed)?;
        self.is_named = true;
        Ok(())
    }

    /// The same as qcow2. The raw file goes.
    pub(super) fn name_as_qcow2(self, path: &Path) -> anyhow::Result<()> {
        let converted = PartFile::new(&beside(path, ".qcow2"), true)?;
        convert("raw", &self.part, "qcow2", &converted.part)?;
        converted.name(path)
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.is_named {
            let _ = fs::remove_file(&self.part);
        }
    }
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// A qcow2 image, which was checked to name no other file, as a raw file beside it, which goes when it is dropped.
pub(super) fn unpacked(path: &Path) -> anyhow::Result<PartFile> {
    let mut raw = PartFile::new(&beside(path, ".raw"), true)?;
    convert("qcow2", path, "raw", &raw.part)?;
    // qemu-img may have made the file anew.
    raw.file = File::open(&raw.part).with_context(|| format!("cannot open {}", raw.part.display()))?;
    Ok(raw)
}

/// Is there a qemu-img? Better asked before anything long is begun.
pub(super) fn require_qemu_img() -> anyhow::Result<()> {
    let status = Command::new(QEMU_IMG).arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).status();
    started(status).map(drop)
}

fn convert(from_format: &str, from: &Path, to_format: &str, to: &Path) -> anyhow::Result<()> {
    // A name that starts with a dash is no option, and one with a colon no protocol.
    let plain = |path: &Path| -> PathBuf {
        if path.is_absolute() { path.to_owned() } else { Path::new(".").join(path) }
    };
    let (from, to) = (plain(from), plain(to));
    let command = Command::new(QEMU_IMG)
        .args(["convert", "-f", from_format, "-O", to_format])
        .args([&from, &to])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    let status = started(command)?;
    if !status.success() {
        bail!("{QEMU_IMG} convert ended with {status}");
    }
    Ok(())
}

fn started<T>(result: io::Result<T>) -> anyhow::Result<T> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "{QEMU_IMG} is not installed, and qcow2 is left to it; install it (Debian: qemu-utils), or use a raw image"
        ),
        result => result.with_context(|| format!("cannot start {QEMU_IMG}")),
    }
}
