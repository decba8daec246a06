//! Kernel loading and the PVH hand-over.
//!
//! A kernel comes as an ELF file or as a bzImage. A bzImage is unpacked here, on the host, and its
//! inner ELF is entered by PVH, so a distribution's kernel starts as fast as a bare vmlinux: the
//! guest runs no decompressor and no real-mode code. Nothing here knows of KVM: [`load`] writes
//! into guest memory and returns plain data, of which [`PvhEntry`] is what the boot vCPU starts
//! with.
//!
//! | guest-physical | what |
//! |---|---|
//! | 0x6000 | `hvm_start_info`, then the module list |
//! | 0x7000 | memory map |
//! | 0x2_0000 | command line |
//! | 0xf_fff0 | where a BIOS is entered: code that resets the machine |
//! | 1 MiB and up | the kernel, where its program headers say |
//! | high in low memory | initial RAM file system |

mod cmdline;
mod decompress;
mod elf;
mod initramfs;
mod inplace;
mod kernel;
mod kernel_share;
mod pvh;
mod reset_vector;
mod scratch;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use foreshore_devices::memory::layout::BootMemory;
use thiserror::Error;
use vm_memory::GuestMemoryBackend;

pub(crate) use cmdline::{CommandLineError, Pluggable};
pub(crate) use decompress::DecompressError;
pub(crate) use elf::ElfError;
pub(crate) use initramfs::Initramfs;
pub(crate) use kernel::LoadedKernel;
pub(crate) use kernel_share::{KernelShare, check_ratio};
pub(crate) use pvh::{PvhEntry, Segment};

/// What to boot, and the machine it is booted on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BootRequest<'a> {
    /// An ELF kernel with a PVH note, or a bzImage; or a firmware.
    pub kernel: &'a Path,
    /// It is a firmware: an ELF file with a PVH note, which gets neither a command line nor an
    /// initial RAM file system.
    pub is_firmware: bool,
    /// Initial RAM file system.
    pub initramfs: Option<&'a Path>,
    /// The command line as the user wrote it.
    pub cmdline: &'a str,
    pub boot_memory: BootMemory,
    /// The memory that can be plugged later: the guest is told what to make of it.
    pub pluggable: Pluggable,
    /// Division of boot memory between the kernel and programs.
    pub kernel_share: Option<KernelShare>,
}

/// What was loaded, and how it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BootInfo {
    /// The boot vCPU's first state.
    pub entry: PvhEntry,
    pub kernel: LoadedKernel,
    /// The initial RAM file system, if there is one.
    pub initramfs: Option<Initramfs>,
    /// The command line that the guest gets.
    pub cmdline: String,
}

/// Why a VM cannot boot what it was given.
#[derive(Debug, Error)]
pub(crate) enum BootError {
    #[error("{flag} {}: cannot be read", path.display())]
    Read {
        /// What named the file.
        flag: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{flag} {} is {kind}, and must be a file", path.display())]
    NotAFile {
        /// Flag that names the path.
        flag: &'static str,
        path: PathBuf,
        /// Type of the file.
        kind: &'static str,
    },
    /// An initial RAM file system without content.
    #[error("--initramfs {} is empty; omit the flag for a guest without an initramfs", path.display())]
    EmptyInitramfs { path: PathBuf },
    #[error("--kernel {} is not a kernel: expected an ELF file or a bzImage, found {found}", path.display())]
    NotAKernel {
        path: PathBuf,
        /// What its first bytes are.
        found: String,
    },
    /// Not an ELF file.
    #[error("--firmware {} is no firmware for PVH: expected an ELF file, found {found}", path.display())]
    NotAFirmware {
        path: PathBuf,
        /// What its first bytes are.
        found: String,
    },
    /// A boot image that has no Linux in it, such as memtest86+.
    #[error(
        "--kernel {} has the header of a bzImage but no Linux kernel in it, as memtest86+ and boot loaders do; \
         foreshore starts Linux, and ELF files with a PVH note", path.display()
    )]
    NoPayload { path: PathBuf },
    /// A bzImage of a boot protocol without `payload_offset`.
    #[error(
        "--kernel {} is a bzImage of boot protocol {}.{:02}: a Linux before 2.6.26, which has 2.08, or another program; \
         foreshore starts Linux 2.6.26 and later, and ELF files with a PVH note",
        path.display(), version >> 8, version & 0xff
    )]
    OldProtocol {
        path: PathBuf,
        /// Boot protocol version, major in the high byte.
        version: u16,
    },
    /// The file ends before what its header announces.
    #[error(
        "--kernel {} is truncated: it has {actual_bytes} bytes, its header announces {expected_bytes}",
        path.display()
    )]
    Truncated {
        path: PathBuf,
        /// Bytes that should be there.
        expected_bytes: u64,
        /// Bytes that are.
        actual_bytes: u64,
    },
    #[error("--kernel {}: cannot be unpacked", path.display())]
    Decompress { path: PathBuf, source: DecompressError },
    /// The ELF file, or the one inside the bzImage, cannot be loaded.
    #[error("{flag} {}: cannot be loaded", path.display())]
    Elf {
        /// What named the file.
        flag: &'static str,
        path: PathBuf,
        source: ElfError,
    },
    /// The initial RAM file system does not fit between the kernel and the end of low memory.
    #[error(
        "--initramfs {} has {size_bytes} bytes; between the kernel's end at {kernel_end:#x} and the end of low memory at \
         {low_end:#x} it does not fit",
        path.display()
    )]
    InitramfsDoesNotFit {
        path: PathBuf,
        size_bytes: u64,
        /// The first address behind the kernel.
        kernel_end: u64,
        /// The first address behind low memory.
        low_end: u64,
    },
    #[error("--cmdline")]
    CommandLine(#[from] CommandLineError),
    #[error(
        "--memory: boot memory of {boot_memory_bytes} bytes is too small for the boot data at {address:#x}"
    )]
    TooLittleMemory {
        /// Boot memory in bytes.
        boot_memory_bytes: u64,
        /// Where the data should go.
        address: u64,
    },
}

/// Opens the file that `flag` names, and returns it with its length. Only regular files are
/// accepted, because other types have no length, and opening a pipe would wait for its writer.
fn open_file(flag: &'static str, path: &Path) -> Result<(File, u64), BootError> {
    let read_error = |source| BootError::Read { flag, path: path.to_path_buf(), source };
    let kind = match fs::metadata(path).map_err(read_error)?.file_type() {
        kind if kind.is_file() => {
            let file = File::open(path).map_err(read_error)?;
            let file_bytes = file.metadata().map_err(read_error)?.len();
            return Ok((file, file_bytes));
        }
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_block_device() => "a block device",
        _ => "a character device",
    };
    Err(BootError::NotAFile { flag, path: path.to_path_buf(), kind })
}

/// Loads a kernel and everything it needs to start.
///
/// `memory` must hold the boot memory that `request` announces, reading as zeros: the kernel's
/// uninitialised data is not written. After an error it holds anything. ACPI tables are not placed
/// here; the start info points at [`RSDP_START`](foreshore_devices::memory::layout::RSDP_START).
///
/// # Safety
/// Nobody else reads or writes that memory meanwhile: no vCPU runs, and no device is there. It is
/// anonymous, mapped shared, or a private mapping of a file that has no data: pages of one would
/// have the file's contents again when they are given back.
pub(crate) unsafe fn load<M: GuestMemoryBackend>(
    memory: &M,
    request: &BootRequest,
) -> Result<BootInfo, BootError> {
    // What a firmware boots has a command line of its own.
    let cmdline = match request.is_firmware {
        true => String::new(),
        false => cmdline::compose(request.cmdline, request.pluggable, request.kernel_share)?,
    };
    let kernel = match request.is_firmware {
        true => kernel::load_firmware(memory, request.kernel, request.boot_memory)?,
        // SAFETY: the same contract.
        false => unsafe { kernel::load(memory, request.kernel, request.boot_memory) }?,
    };
    let initramfs = request
        .initramfs
        .filter(|_| !request.is_firmware)
        .map(|path| initramfs::load(memory, path, kernel.end, request.boot_memory))
        .transpose()?;
    let handover = pvh::Handover {
        cmdline: &cmdline,
        initramfs: initramfs.as_ref(),
        boot_memory: request.boot_memory,
    };
    handover.write(memory)?;
    reset_vector::write(memory, request.boot_memory)?;
    let entry = PvhEntry::new(kernel.entry);
    Ok(BootInfo { entry, kernel, initramfs, cmdline })
}
