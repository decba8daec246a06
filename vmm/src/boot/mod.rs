//! Kernel loading and the PVH handover.
//!
//! A kernel is an ELF file or a bzImage. A bzImage is unpacked on the host, and the ELF file inside
//! it is entered by PVH. A distribution's kernel therefore starts as fast as a plain vmlinux,
//! because the guest runs neither a decompressor nor real-mode code. This module does not use KVM:
//! [`load`] writes guest memory and returns plain data, including the initial state of the boot
//! vCPU in [`PvhEntry`].
//!
//! | guest-physical | content |
//! |---|---|
//! | 0x6000 | `hvm_start_info`, then the module list |
//! | 0x7000 | memory map |
//! | 0x2_0000 | command line |
//! | 0xf_fff0 | BIOS entry: code that resets the machine |
//! | 1 MiB and up | kernel, at the addresses of its program headers |
//! | end of low memory | initial RAM file system |

mod cmdline;
mod elf;
mod initramfs;
mod inplace;
mod kernel;
mod kernel_share;
mod pvh;
mod reset_vector;
mod scratch;
mod unpack;

#[cfg(test)]
#[path = "../../decompress/tests/payloads/mod.rs"]
mod payloads;

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use foreshore_decompress::MAX_KERNEL_BYTES;
use foreshore_devices::memory::PrivateRanges;
use foreshore_devices::memory::layout::BootMemory;
use thiserror::Error;
use vm_memory::{Address, GuestMemoryBackend};

pub(crate) use cmdline::{CommandLineError, Pluggable};
pub(crate) use elf::ElfError;
pub(crate) use initramfs::Initramfs;
pub(crate) use kernel::LoadedKernel;
pub(crate) use kernel_share::{KernelShare, check_ratio};
pub(crate) use pvh::{PvhEntry, Segment};
pub(crate) use unpack::UnpackError;

/// Kernel or firmware, and the machine that boots it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BootRequest<'a> {
    /// ELF kernel with a PVH note, bzImage or firmware.
    pub kernel: &'a Path,
    /// True for firmware: an ELF file with a PVH note that receives neither a command line nor an
    /// initramfs.
    pub is_firmware: bool,
    /// Path of the initramfs.
    pub initramfs: Option<&'a Path>,
    /// Command line given by the user.
    pub cmdline: &'a str,
    pub boot_memory: BootMemory,
    /// Memory that a kernel can be unpacked into.
    pub private: &'a PrivateRanges,
    /// Hotpluggable memory, which determines default parameters on the command line.
    pub pluggable: Pluggable,
    /// Division of boot memory between the kernel and user programs.
    pub kernel_share: Option<KernelShare>,
}

/// Loaded kernel and the initial state of the vCPU that starts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BootInfo {
    /// Initial state of the boot vCPU.
    pub entry: PvhEntry,
    pub kernel: LoadedKernel,
    pub initramfs: Option<Initramfs>,
    /// Complete command line of the guest.
    pub cmdline: String,
}

#[derive(Debug, Error)]
pub(crate) enum BootError {
    #[error("{flag} {}: cannot read the file", path.display())]
    Read {
        /// Flag that names the file.
        flag: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{flag} {} is {kind}, and must be a file", path.display())]
    NotAFile {
        /// Flag that names the path.
        flag: &'static str,
        path: PathBuf,
        /// Detected type of the file.
        kind: &'static str,
    },
    #[error("--initramfs {} is empty; omit the flag for a guest without an initramfs", path.display())]
    EmptyInitramfs { path: PathBuf },
    #[error("--kernel {} is not a kernel: expected an ELF file or a bzImage, found {found}", path.display())]
    NotAKernel {
        path: PathBuf,
        /// Description of the first bytes in the file.
        found: String,
    },
    #[error("--firmware {} is not a PVH firmware: expected an ELF file, found {found}", path.display())]
    NotAFirmware {
        path: PathBuf,
        /// Description of the first bytes in the file.
        found: String,
    },
    /// The file is a boot image without Linux, such as memtest86+.
    #[error(
        "--kernel {} has the header of a bzImage but no Linux kernel in it, as memtest86+ and boot loaders do; \
         foreshore boots Linux, and ELF files with a PVH note", path.display()
    )]
    NoPayload { path: PathBuf },
    #[error(
        "--kernel {}: its payload has {payload_bytes} bytes, and must have at most {MAX_KERNEL_BYTES}",
        path.display()
    )]
    PayloadTooLarge { path: PathBuf, payload_bytes: u64 },
    /// The bzImage has a boot protocol without `payload_offset`.
    #[error(
        "--kernel {} is a bzImage of boot protocol {}.{:02}: a Linux before 2.6.26, which has 2.08, or another program; \
         foreshore boots Linux 2.6.26 and later, and ELF files with a PVH note",
        path.display(), version >> 8, version & 0xff
    )]
    OldProtocol {
        path: PathBuf,
        /// Version of the boot protocol, with the major version in the high byte.
        version: u16,
    },
    #[error(
        "--kernel {} is truncated: it has {actual_bytes} bytes, its header announces {expected_bytes}",
        path.display()
    )]
    Truncated {
        path: PathBuf,
        /// Length of the file according to its header.
        expected_bytes: u64,
        /// Length of the file.
        actual_bytes: u64,
    },
    #[error("--kernel {}: cannot unpack the file", path.display())]
    Decompress { path: PathBuf, source: UnpackError },
    /// The ELF file, or the ELF file inside the bzImage, cannot be loaded.
    #[error("{flag} {}: cannot load the file", path.display())]
    Elf {
        /// Flag that names the file.
        flag: &'static str,
        path: PathBuf,
        source: ElfError,
    },
    /// The initramfs does not fit between the kernel and the end of low memory.
    #[error(
        "--initramfs {} has {size_bytes} bytes, and does not fit between the kernel's end at {kernel_end:#x} and \
         the end of low memory at {low_end:#x}",
        path.display()
    )]
    InitramfsDoesNotFit {
        path: PathBuf,
        size_bytes: u64,
        /// First address after the kernel.
        kernel_end: u64,
        /// Address at which low memory ends.
        low_end: u64,
    },
    #[error("--cmdline")]
    CommandLine(#[from] CommandLineError),
    #[error(
        "--memory: boot memory of {boot_memory_bytes} bytes is too small for the boot data at {address:#x}"
    )]
    TooLittleMemory {
        /// Size of boot memory.
        boot_memory_bytes: u64,
        /// Address of the data.
        address: u64,
    },
}

/// Opens the file that `flag` names, and returns it with its length. Only regular files are
/// accepted. Other types have no length, and opening a pipe would block until it has a writer.
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

/// Loads a kernel and everything that it needs to start.
///
/// `memory` must contain the boot memory of `request` and read as zeros, because the kernel's
/// uninitialized data is not written. After an error, the contents of `memory` are undefined. This
/// function does not write the ACPI tables, but the start info points to their address,
/// [`RSDP_START`](foreshore_devices::memory::layout::RSDP_START).
///
/// Files are parsed in memory of this process: their headers and compressed payloads are never read
/// from guest memory that another process can access.
///
/// # Safety
/// `request.private` describes `memory`. No other code of this process accesses the memory during
/// the call, because no vCPU runs and devices do not exist yet.
pub(crate) unsafe fn load<M: GuestMemoryBackend>(
    memory: &M,
    request: &BootRequest,
) -> Result<BootInfo, BootError> {
    // Firmware passes its own command line to the kernel.
    let cmdline = match request.is_firmware {
        true => String::new(),
        false => cmdline::compose(request.cmdline, request.pluggable, request.kernel_share)?,
    };
    let BootRequest { boot_memory, private, .. } = *request;
    let kernel = match request.is_firmware {
        true => kernel::load_firmware(memory, request.kernel, boot_memory)?,
        // SAFETY: this function has the same contract.
        false => unsafe { kernel::load(memory, request.kernel, boot_memory, private) }?,
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

/// Addresses of a kernel and an initramfs in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// PVH entry point.
    pub entry: u64,
    /// First address after the kernel's segments.
    pub kernel_end: u64,
    pub initramfs: Option<Range<u64>>,
}

/// Loads a kernel and an initramfs without command line and start info, for fuzz targets.
///
/// # Safety
/// `private` describes `memory`. No other code accesses the memory during the call.
pub unsafe fn load_payload<M: GuestMemoryBackend>(
    memory: &M,
    kernel: &Path,
    initramfs: Option<&Path>,
    boot_memory: BootMemory,
    private: &PrivateRanges,
) -> Result<Payload, Box<dyn std::error::Error + Send + Sync>> {
    // SAFETY: this function has the same contract.
    let LoadedKernel { entry, end, .. } =
        unsafe { kernel::load(memory, kernel, boot_memory, private) }?;
    let initramfs = initramfs
        .map(|path| initramfs::load(memory, path, end, boot_memory))
        .transpose()?
        .map(|Initramfs { start, size_bytes }| start.raw_value()..start.raw_value() + size_bytes);
    Ok(Payload { entry, kernel_end: end, initramfs })
}
