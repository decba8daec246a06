//! A disk for a test: an ext4 file system whose content reaches its image only when it is flushed.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, ensure};

use crate::runner::{skip, this_tests_dir};

const WRITEBACK: &str = "/proc/sys/vm/dirty_writeback_centisecs";

/// An ext4 file system in a sparse file on a tmpfs of its own.
///
/// What is in the image is what a loss of power would leave; what is in the page cache of the file system is not. The
/// tmpfs can be filled up: then whatever needs a new block of the image fails with an I/O error, as on a disk that dies.
#[derive(Debug)]
pub struct Disk {
    /// The tmpfs.
    room: PathBuf,
    /// Where the file system is mounted.
    mounted: PathBuf,
}

impl Disk {
    /// Makes one of `disk_mib` with room for `room_mib` of content. Skips the test where that needs more than it may.
    ///
    /// It is mounted where this process and its children alone see it, and goes when they end.
    pub fn create(disk_mib: u64, room_mib: u64) -> Result<Self> {
        if let Err(error) = private_mounts() {
            return skip(format!("file systems cannot be mounted here: {error}"));
        }
        let dir = this_tests_dir();
        let (room, mounted) = (dir.join("room"), dir.join("disk"));
        fs::create_dir_all(&room).with_context(|| format!("Cannot make {}", room.display()))?;
        let size = format!("size={room_mib}m");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", text(&room)?])?;
        let disk = Self { room, mounted };
        File::create(disk.image())?.set_len(disk_mib << 20)?;
        // Journal and inode tables are zeros in a sparse file already.
        let lazy = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
        run("mkfs.ext4", &["-q", "-F", "-E", lazy, text(&disk.image())?])?;
        mount_image(&disk.image(), &disk.mounted)?;
        Ok(disk)
    }

    /// Where its files are.
    pub fn dir(&self) -> &Path {
        &self.mounted
    }

    fn image(&self) -> PathBuf {
        self.room.join("image")
    }

    /// Leaves no room: what needs a new block on the disk fails from now on.
    pub fn fill_up(&self) -> Result<()> {
        let mut filler = File::create(self.room.join("filler"))?;
        // Large steps first, then whatever is left.
        for step in [1 << 20, 4096] {
            loop {
                match filler.write_all(&vec![0xff; step]) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => return Err(error).context("Cannot fill the disk up"),
                }
            }
        }
        Ok(())
    }

    /// Cuts the power: what the disk has now, mounted anew. Nobody may be writing, and write-back must be held
    /// ([`HeldWriteback`]), or the copy is of no one moment.
    pub fn after_power_loss(&self) -> Result<PathBuf> {
        // What nobody has flushed is lost, or this is no power cut.
        let marker = "nobody has flushed this";
        fs::write(self.mounted.join("unflushed"), marker)?;
        let (image, mounted) = (self.room.join("image-after"), self.room.with_file_name("disk-after"));
        fs::copy(self.image(), &image).context("Cannot copy the disk")?;
        mount_image(&image, &mounted)?;
        let found = fs::read_to_string(mounted.join("unflushed")).unwrap_or_default();
        ensure!(found != marker, "What was not flushed is on the disk: the copy proves nothing");
        Ok(mounted)
    }
}

/// Keeps the host from writing dirty pages back by itself, until dropped.
#[derive(Debug)]
pub struct HeldWriteback(String);

impl HeldWriteback {
    /// Holds it. For the emulated host alone: it is a setting of the whole machine.
    pub fn hold() -> Result<Self> {
        if std::env::var_os("FORESHORE_HOST").is_none_or(|host| host != "nested") {
            return skip("holding write-back would change a machine that is not ours");
        }
        let before = fs::read_to_string(WRITEBACK).with_context(|| format!("Cannot read {WRITEBACK}"))?;
        fs::write(WRITEBACK, "0").with_context(|| format!("Cannot change {WRITEBACK}"))?;
        Ok(Self(before))
    }
}

impl Drop for HeldWriteback {
    fn drop(&mut self) {
        if let Err(error) = fs::write(WRITEBACK, &self.0) {
            println!("Cannot restore {WRITEBACK}: {error}");
        }
    }
}

fn mount_image(image: &Path, at: &Path) -> Result<()> {
    fs::create_dir_all(at).with_context(|| format!("Cannot make {}", at.display()))?;
    run("mount", &["-t", "ext4", "-o", "loop", text(image)?, text(at)?])
}

/// Mounts from here on are seen by this process and its children only.
fn private_mounts() -> io::Result<()> {
    // SAFETY: no pointers; only the calling thread, from which a test starts everything, changes its namespace.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the path is a C string; the other pointers may be null when only the propagation changes (mount(2)).
    let result = unsafe { libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("Cannot start {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {} ended with {}:\n{}",
        arguments.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
