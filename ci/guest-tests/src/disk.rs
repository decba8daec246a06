//! Disks for tests: file systems whose content reaches their image only when they are flushed, and
//! block devices.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};

use crate::runner::{skip, this_tests_dir};
use crate::user::need_root;

const WRITEBACK: &str = "/proc/sys/vm/dirty_writeback_centisecs";

/// Type of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// Ordinary ext4 with extents and a journal.
    Ext4,
    /// ext4 without extents. It cannot allocate space in advance, and needs extra blocks for its
    /// block lists.
    Ext4ByBlocks,
    /// XFS. It requires at least 300 MiB.
    Xfs,
}

impl FileSystem {
    fn name(self) -> &'static str {
        match self {
            FileSystem::Ext4 | FileSystem::Ext4ByBlocks => "ext4",
            FileSystem::Xfs => "xfs",
        }
    }

    /// Creates the file system on a file or device, and overwrites its content.
    pub fn make(self, at: &Path) -> Result<()> {
        // In a sparse file, journal and inode tables already read as zeros.
        let lazy = ["-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"];
        match self {
            FileSystem::Ext4 => run("mkfs.ext4", &[&lazy[..], &[text(at)?]].concat()),
            FileSystem::Ext4ByBlocks => {
                let blocks =
                    ["-O", "^extent,^64bit,^has_journal", "-b", "4096", "-m", "0", text(at)?];
                run("mkfs.ext4", &[&lazy[..], &blocks].concat())
            }
            // Not all versions of Linux support reflink together with DAX.
            FileSystem::Xfs => run("mkfs.xfs", &["-q", "-f", "-m", "reflink=0", text(at)?]),
        }
    }
}

/// Creates a file of zeros in the test's directory.
pub fn sparse_file(name: &str, bytes: u64) -> Result<PathBuf> {
    let path = this_tests_dir().join(name);
    fs::create_dir_all(this_tests_dir())
        .and_then(|()| File::create(&path)?.set_len(bytes))
        .with_context(|| format!("Cannot create {}", path.display()))?;
    Ok(path)
}

/// Fills a file system with a single file.
pub fn fill_up(path: &Path) -> Result<()> {
    let mut filler = File::create(path)?;
    // Writes large pieces first, and then small pieces to fill the rest.
    for step in [1 << 20, 4096] {
        loop {
            match filler.write_all(&vec![0xff; step]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => return Err(error).context("Cannot fill the disk"),
            }
        }
    }
    Ok(filler.sync_all()?)
}

/// Returns the mount point of a file system with DAX. Skips the test if the host has no such file
/// system.
pub fn need_dax() -> Result<&'static Path> {
    let mounts = fs::read_to_string("/proc/mounts").context("Cannot read /proc/mounts")?;
    let is_it = |line: &str| line.split(' ').nth(1) == Some("/pm") && line.contains("dax=always");
    match mounts.lines().any(is_it) {
        true => Ok(Path::new("/pm")),
        false => skip("no file system with DAX on /pm (ci/nested/host --nvdimm 512 has one)"),
    }
}

/// tmpfs of a test that can be filled up. When it is full, each operation that needs a new block
/// for an image on it fails with an I/O error, as on a failing disk.
#[derive(Debug)]
pub struct LimitedTmpfs(PathBuf);

impl LimitedTmpfs {
    /// Mounts a tmpfs of `size_mib` for this process and its children, until all of them have
    /// ended. Skips the test if mounting is not allowed.
    pub fn create(size_mib: u64) -> Result<Self> {
        need_private_mounts()?;
        let dir = this_tests_dir().join("room");
        fs::create_dir_all(&dir).with_context(|| format!("Cannot create {}", dir.display()))?;
        run("mount", &["-t", "tmpfs", "-o", &format!("size={size_mib}m"), "tmpfs", text(&dir)?])?;
        Ok(Self(dir))
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    pub fn fill_up(&self) -> Result<()> {
        fill_up(&self.filler())
    }

    pub fn delete_filler(&self) -> Result<()> {
        fs::remove_file(self.filler()).context("Cannot remove the file that fills the disk")
    }
}

/// File system in a sparse file on a separate tmpfs.
///
/// The image contains only what would survive a loss of power. It does not contain data that is
/// only in the page cache of the file system. After the tmpfs has been filled up, each operation
/// that needs a new block in the image fails with an I/O error, as on a failing disk.
#[derive(Debug)]
pub struct Disk {
    tmpfs: LimitedTmpfs,
    mounted: PathBuf,
}

impl Disk {
    /// Creates an ext4 file system of `disk_mib`. Its image has space for `tmpfs_mib` of content.
    /// Skips the test if mounting is not allowed.
    ///
    /// The mount is visible only to this process and its children, and disappears when they have
    /// ended.
    pub fn create(disk_mib: u64, tmpfs_mib: u64) -> Result<Self> {
        Self::create_with(FileSystem::Ext4, disk_mib, tmpfs_mib)
    }

    pub fn create_with(file_system: FileSystem, disk_mib: u64, tmpfs_mib: u64) -> Result<Self> {
        let tmpfs = LimitedTmpfs::create(tmpfs_mib)?;
        let disk = Self { tmpfs, mounted: this_tests_dir().join("disk") };
        File::create(disk.image())?.set_len(disk_mib << 20)?;
        file_system.make(&disk.image())?;
        mount(&disk.image(), &disk.mounted, file_system, "loop")?;
        Ok(disk)
    }

    pub fn dir(&self) -> &Path {
        &self.mounted
    }

    fn image(&self) -> PathBuf {
        self.tmpfs.dir().join("image")
    }

    pub fn fill_up(&self) -> Result<()> {
        self.tmpfs.fill_up()
    }

    /// Simulates a power cut: mounts a copy of the disk's current content. There must be no
    /// writers, and [`HeldWriteback`] must hold back write-back. Otherwise the copy would mix
    /// content from different times.
    pub fn after_power_loss(&self) -> Result<PathBuf> {
        // Unflushed data must be lost. Otherwise the copy would not simulate a power cut.
        let marker = "written without a flush";
        fs::write(self.mounted.join("unflushed"), marker)?;
        let (image, mounted) =
            (self.tmpfs.dir().join("image-after"), self.mounted.with_file_name("disk-after"));
        fs::copy(self.image(), &image).context("Cannot copy the disk")?;
        mount(&image, &mounted, FileSystem::Ext4, "loop")?;
        let found = fs::read_to_string(mounted.join("unflushed")).unwrap_or_default();
        ensure!(found != marker, "Data without a flush are on the disk: the copy proves nothing");
        Ok(mounted)
    }
}

/// Prevents the host from writing back dirty pages by itself, until dropped.
#[derive(Debug)]
pub struct HeldWriteback(String);

impl HeldWriteback {
    /// Holds back write-back, only on the emulated host, because the setting affects the whole
    /// machine.
    pub fn hold() -> Result<Self> {
        if std::env::var_os("FORESHORE_HOST").is_none_or(|host| host != "nested") {
            return skip("holding write-back would change a machine that is not ours");
        }
        need_root("hold back write-back")?;
        let before =
            fs::read_to_string(WRITEBACK).with_context(|| format!("Cannot read {WRITEBACK}"))?;
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

/// Loop device on a sparse file in the test's directory. Drop removes it.
#[derive(Debug)]
pub struct LoopDevice {
    image: PathBuf,
    device: PathBuf,
}

impl LoopDevice {
    pub fn create(size_mib: u64) -> Result<Self> {
        Self::create_in(&this_tests_dir(), size_mib)
    }

    pub fn create_in(dir: &Path, size_mib: u64) -> Result<Self> {
        need_root("attach a loop device")?;
        let image = dir.join("loop-image");
        let free = Command::new("losetup").arg("-f").output().context("Cannot start losetup")?;
        let device = PathBuf::from(String::from_utf8(free.stdout)?.trim());
        if !free.status.success() || !device.exists() {
            return skip("no loop devices here");
        }
        fs::create_dir_all(dir)?;
        File::create(&image)?.set_len(size_mib << 20)?;
        run("losetup", &[text(&device)?, text(&image)?])?;
        Ok(Self { image, device })
    }

    pub fn path(&self) -> &Path {
        &self.device
    }

    /// Punches holes into the file where it contains zeros, so that writes there need new blocks.
    pub fn dig_holes(&self) -> Result<()> {
        const PIECE_BYTES: usize = 64 << 10;
        let image = File::options().read(true).write(true).open(&self.image)?;
        let mut piece = vec![0; PIECE_BYTES];
        let len_bytes = image.metadata()?.len();
        for at in (0..len_bytes).step_by(PIECE_BYTES) {
            let bytes = &mut piece[..(len_bytes - at).min(PIECE_BYTES as u64) as usize];
            image.read_exact_at(bytes, at)?;
            if bytes.iter().any(|byte| *byte != 0) {
                continue;
            }
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&image, mode, at, bytes.len() as u64).context("Cannot punch a hole")?;
        }
        Ok(())
    }

    pub fn lengthen(&self, size_mib: u64) -> Result<()> {
        File::options().write(true).open(&self.image)?.set_len(size_mib << 20)?;
        run("losetup", &["-c", text(&self.device)?])
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = text(&self.device).and_then(|device| run("losetup", &["-d", device]));
        if let Err(error) = detached {
            println!("{error:#}");
        }
    }
}

/// Mounts a file system that is visible only to this process and its children
/// ([`need_private_mounts`]).
pub fn mount(source: &Path, at: &Path, file_system: FileSystem, options: &str) -> Result<()> {
    if file_system == FileSystem::Xfs {
        run("modprobe", &["xfs"])?;
    }
    fs::create_dir_all(at).with_context(|| format!("Cannot create {}", at.display()))?;
    run("mount", &["-t", file_system.name(), "-o", options, text(source)?, text(at)?])
}

pub fn unmount(at: &Path) -> Result<()> {
    run("umount", &[text(at)?])
}

/// Makes later mounts visible only to this process and its children. They disappear when these
/// processes have ended. Skips the test if this is not allowed.
pub fn need_private_mounts() -> Result<()> {
    need_root("mount a file system")?;
    match private_mounts() {
        Ok(()) => Ok(()),
        Err(error) => skip(format!("file systems cannot be mounted here: {error}")),
    }
}

/// Makes later mounts visible only to this process and its children.
fn private_mounts() -> io::Result<()> {
    // SAFETY: the call takes no pointers. It changes only the namespace of the calling thread, from
    // which a test starts everything.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the path is a C string. The other pointers may be null if only the propagation type
    // changes (mount(2)).
    let result =
        unsafe { libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()) };
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
