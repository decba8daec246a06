//! Image files. A raw image appears under its name only when it is complete. qemu-img converts
//! qcow2 images.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use pmem_volume::file_mode::PRIVATE_MODE;
use pmem_volume::pool::ownership::{PoolContent, pool_content};
use pmem_volume::progress::{OnProgress, Progress, Task};
use pmem_volume::unnamed_file::{IfExists, UnnamedFile};

use super::args::ImageFormat;

const QEMU_IMG: &str = "qemu-img";
/// Returns true for `-`, which means stdin or stdout.
pub(crate) fn is_stdio(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Checks that `path` is free, or is a file that may be replaced. Call it before any long work.
/// Neither a pool nor the `source` of the copy may be replaced, because no other copy of them
/// exists.
pub(super) fn check_destination(path: &Path, replace: bool, source: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            bail!(
                "{}: not a regular file; images are written only to regular files",
                path.display()
            )
        }
        Ok(_) if !replace => bail!("{}: {EXISTS}", path.display()),
        Ok(metadata) => {
            let inspect_failed = || format!("cannot inspect {}", path.display());
            let source = fs::metadata(source)
                .with_context(|| format!("cannot inspect {}", source.display()))?;
            if (source.dev(), source.ino()) == (metadata.dev(), metadata.ino()) {
                bail!(
                    "{}: it is the source of the export, and --force does not replace the source",
                    path.display()
                );
            }
            let file = File::open(path).with_context(inspect_failed)?;
            if pool_content(&file, path) != PoolContent::NoPool {
                bail!("{}: it is a pool, and --force does not replace one", path.display());
            }
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot inspect {}", path.display())),
    }
}

const EXISTS: &str = "the file exists already; --force replaces it";

/// Creates a file without a name in the folder of `path`.
pub(super) fn create_unnamed(path: &Path) -> anyhow::Result<UnnamedFile> {
    UnnamedFile::in_folder_of(path, PRIVATE_MODE)
        .with_context(|| format!("cannot create a file in the folder of {}", path.display()))
}

/// Makes an image durable and gives it its name. With `replace`, it replaces an existing file.
pub(super) fn name(image: UnnamedFile, path: &Path, replace: bool) -> anyhow::Result<()> {
    image.file.sync_all().with_context(|| format!("cannot complete {}", path.display()))?;
    let if_exists = if replace { IfExists::Replace } else { IfExists::Fail };
    match image.name(path, if_exists) {
        // Another process created the file in the meantime.
        Err(error) if !replace && error.source.kind() == io::ErrorKind::AlreadyExists => {
            bail!("{}: {EXISTS}", path.display())
        }
        result => result.with_context(|| format!("cannot complete {}", path.display())),
    }
}

/// Converts an image to another format, in a nameless file in the folder of `path`. Progress is
/// reported in units of `len_bytes`.
///
/// The conversion reads the open file that was checked, even if another file has its name by now.
pub(super) fn convert(
    from: (&File, ImageFormat),
    to_format: ImageFormat,
    path: &Path,
    len_bytes: u64,
    progress: OnProgress<'_>,
) -> anyhow::Result<UnnamedFile> {
    let to = create_unnamed(path)?;
    let (from, from_format) = from;
    let mut command = Command::new(QEMU_IMG);
    command.args(["convert", "-p", "-f", format_name(from_format), "-O", format_name(to_format)]);
    command.args([from, &to.file].map(proc_fd_path)).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = map_spawn_error(command.spawn())?;
    let mut output = child.stdout.take().expect("it is piped");
    let result = read_progress(&mut output, &mut |done| {
        let done_bytes = (len_bytes as f64 * done) as u64;
        progress(Progress {
            task: Task::Convert,
            done_bytes: done_bytes.min(len_bytes),
            total_bytes: len_bytes,
        });
    });
    let status = child.wait().with_context(|| format!("cannot wait for {QEMU_IMG}"))?;
    result.with_context(|| format!("cannot read the output of {QEMU_IMG}"))?;
    if !status.success() {
        bail!("{QEMU_IMG} convert ended with {status}");
    }
    Ok(to)
}

/// Returns a path through which a child process can open a file of this process, even if the file
/// has no name (proc(5), /proc/PID/fd).
fn proc_fd_path(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn format_name(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    }
}

/// Reads the progress that `qemu-img -p` prints until the end: `(12.34/100%)` repeatedly, separated
/// by carriage returns.
fn read_progress(output: &mut dyn Read, is_done: &mut dyn FnMut(f64)) -> io::Result<()> {
    let (mut text, mut bytes) = (String::new(), [0; 256]);
    loop {
        let count = match output.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        text.push_str(&String::from_utf8_lossy(&bytes[..count]));
        let Some((printed, rest)) = text.rsplit_once(')') else { continue };
        if let Some(percent) = last_percent(printed) {
            is_done(percent / 100.0);
        }
        text = rest.to_owned();
    }
}

/// Returns the last complete percentage in the output.
fn last_percent(printed: &str) -> Option<f64> {
    let (_, last) = printed.rsplit_once('(')?;
    let percent: f64 = last.strip_suffix("/100%")?.trim().parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some(percent)
}

/// Checks that qemu-img is installed. Call it before any long work.
pub(super) fn require_qemu_img() -> anyhow::Result<()> {
    let status =
        Command::new(QEMU_IMG).arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).status();
    map_spawn_error(status).map(drop)
}

fn map_spawn_error<T>(result: io::Result<T>) -> anyhow::Result<T> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "{QEMU_IMG} is not installed, but qcow2 images require it; install it (Debian: qemu-utils), or use a raw image"
        ),
        result => result.with_context(|| format!("cannot start {QEMU_IMG}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_of_qemu_img_is_parsed_in_any_pieces() {
        let printed = b"    (0.00/100%)\r    (12.50/100%)\r    (100.00/100%)\r\n";
        for size in [1, 7, 16, 100] {
            let mut pieces = vec![];
            for piece in printed.chunks(size) {
                pieces.push(piece);
            }
            let mut output = Pieces(pieces.into_iter());
            let mut done = vec![];
            read_progress(&mut output, &mut |now| done.push(now)).unwrap();
            assert_eq!(done.last(), Some(&1.0), "pieces of {size}: {done:?}");
            assert!(done.is_sorted() && done.iter().all(|done| [0.0, 0.125, 1.0].contains(done)));
        }
        for nonsense in ["(abc/100%", "(200/100%", "(-1/100%", "100%", "(NaN/100%", "(1/10"] {
            assert_eq!(last_percent(nonsense), None, "{nonsense}");
        }
    }

    struct Pieces<'a>(std::vec::IntoIter<&'a [u8]>);

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let piece = self.0.next().unwrap_or_default();
            into[..piece.len()].copy_from_slice(piece);
            Ok(piece.len())
        }
    }
}
