//! Faults of anonymous memory that this process handles (userfaultfd(2)).
//!
//! In holes, only stores fault. Loads find zeros, which the kernel provides itself. Faults of
//! absent pages are not used there, because for them, KVM's asynchronous page faults request every
//! page as writable, even if the guest only reads it (Linux virt/kvm/async_pf.c).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use foreshore_types::PAGE_BYTES;
use rustix::process::{Resource, getrlimit};

use super::chunk_access::is_zero;
use crate::memory::backing::Reservation;

/// Requests of ioctl() on `/dev/userfaultfd` and on its contexts (linux/userfaultfd.h). The upper
/// bits are the direction and the size of the argument.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

const UFFD_API: u64 = 0xaa;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// Absent pages can be write-protected (since Linux 6.4).
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
pub(in crate::memory) const UFFD_FEATURE_EVENT_REMAP: u64 = 1 << 2;
pub(in crate::memory) const UFFDIO_REGISTER_MODE_MISSING: u64 = 1 << 0;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// Free descriptors above the one of a context, for contexts of other volumes.
const HIGH_DESCRIPTORS: u64 = 256;
/// Limit of a context's descriptor, because the kernel's table of descriptors grows up to it.
const MAX_DESCRIPTOR: u64 = 1 << 14;

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct AddressRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: AddressRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: AddressRange,
    mode: u64,
}

/// `struct uffd_msg` of a page fault.
#[repr(C)]
#[derive(Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

/// `/dev/userfaultfd`. Its contexts also receive faults of the kernel, for example of KVM, without
/// a privilege of the process.
#[derive(Debug)]
pub struct UserfaultDevice(io::Result<File>);

impl Default for UserfaultDevice {
    fn default() -> Self {
        Self(File::options().read(true).write(true).open(Self::PATH))
    }
}

impl UserfaultDevice {
    const PATH: &str = "/dev/userfaultfd";

    /// Device that could not be opened.
    #[cfg(any(test, feature = "testing"))]
    pub fn missing() -> Self {
        Self(Err(io::ErrorKind::NotFound.into()))
    }

    /// Returns the reason why there are no contexts. `None` if [`Self::create`] succeeds.
    pub fn refusal(&self) -> Option<String> {
        match &self.0 {
            Err(err) => Some(format!("cannot open {}: {err}", Self::PATH)),
            Ok(_) => self.create().err().map(|err| format!("the kernel refuses it: {err}")),
        }
    }

    /// Creates a context, which reports faults of this process.
    pub fn create(&self) -> io::Result<Userfaults> {
        let fd = self.context()?;
        let features = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_UNPOPULATED;
        let protects_absent = match handshake(&fd, features) {
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) => {
                handshake(&fd, UFFD_FEATURE_PAGEFAULT_FLAG_WP).map(|()| false)
            }
            result => result.map(|()| true),
        }?;
        Ok(Userfaults { fd, protects_absent })
    }

    /// Creates a context without a handshake.
    pub(in crate::memory) fn context(&self) -> io::Result<OwnedFd> {
        let device = self.0.as_ref().map_err(|err| io::Error::from(err.kind()))?;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the argument is a number.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has returned a new descriptor.
        above_kvm(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Moves a descriptor above those of KVM. When the process is killed, the kernel closes the highest
/// descriptor first. A VM in KVM ends only when its last page fault has ended, which may need the
/// end of this context.
fn above_kvm(fd: OwnedFd) -> io::Result<OwnedFd> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(MAX_DESCRIPTOR).min(MAX_DESCRIPTOR);
    let lowest = limit.saturating_sub(HIGH_DESCRIPTORS) as libc::c_int;
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, lowest)?)
}

pub(in crate::memory) fn handshake(fd: &OwnedFd, features: u64) -> io::Result<()> {
    let mut api = Api { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: the request takes this structure.
    unsafe { ioctl(fd, UFFDIO_API, &mut api) }
}

/// Registers a range of anonymous memory, whose faults the context then reports.
pub(in crate::memory) fn register(fd: &OwnedFd, start: u64, len: u64, mode: u64) -> io::Result<()> {
    let mut register = Register { range: AddressRange { start, len }, mode, ioctls: 0 };
    // SAFETY: the request takes this structure. It changes no content of memory.
    unsafe { ioctl(fd, UFFDIO_REGISTER, &mut register) }
}

/// Repeats the accesses that wait for a range of addresses.
pub(in crate::memory) fn wake(fd: &OwnedFd, start: u64, len: u64) -> io::Result<()> {
    let mut range = AddressRange { start, len };
    // SAFETY: the request takes this structure.
    unsafe { ioctl(fd, UFFDIO_WAKE, &mut range) }
}

/// # Safety
/// `argument` must be the structure that `request` takes.
unsafe fn ioctl<T>(fd: &OwnedFd, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the caller passes the right structure.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Context that reports stores to protected memory. Threads that store there wait until they are
/// woken, or until the context is closed.
#[derive(Debug)]
pub struct Userfaults {
    fd: OwnedFd,
    /// Set if the kernel can protect absent pages.
    pub(super) protects_absent: bool,
}

impl Userfaults {
    /// Maps zeros at `offset`, and reports stores to them. Another mapping may replace parts of the
    /// range later, which ends the reports for those parts.
    pub fn map_zeros(&self, reservation: &Reservation, offset: u64, len: u64) -> io::Result<()> {
        reservation.map_anonymous(offset, len)?;
        self.protect(reservation, offset, len)
    }

    /// Reports stores to new anonymous memory.
    pub(super) fn protect(
        &self,
        reservation: &Reservation,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        // A huge page cannot share the page tables of protected small pages.
        reservation.advise_small_pages(offset, len);
        let start = reservation.addr() + offset;
        register(&self.fd, start, len, UFFDIO_REGISTER_MODE_WP)?;
        if !self.protects_absent {
            reservation.populate_zeros(offset, len)?;
        }
        let range = AddressRange { start, len };
        let mut protect = WriteProtect { range, mode: UFFDIO_WRITEPROTECT_MODE_WP };
        // SAFETY: the request takes this structure. The range belongs to the reservation.
        unsafe { ioctl(&self.fd, UFFDIO_WRITEPROTECT, &mut protect) }
    }

    /// Returns the addresses of pages that a store may have reached after [`Self::map_zeros`] has
    /// mapped zeros and before it has protected them. Call this directly after `map_zeros`.
    ///
    /// Absent pages can be protected, so a page is present only if it was accessed (mm/mincore.c
    /// counts the marker of a protected absent page as absent). A load also counts, because it
    /// cannot be distinguished. Older kernels have made all pages present, so only their content
    /// shows a store, unless it was 0.
    pub(super) fn accessed_pages(
        &self,
        reservation: &Reservation,
        offset: u64,
        len: u64,
    ) -> io::Result<Vec<u64>> {
        let start = reservation.addr() + offset;
        let pages = (start..start + len).step_by(PAGE_BYTES as usize);
        if !self.protects_absent {
            return Ok(pages.filter(|page| !is_zero(*page)).collect());
        }
        let is_present = reservation.pages(offset, len)?;
        let pages = pages.zip(is_present).filter(|(_, present)| present & 1 != 0);
        Ok(pages.map(|(page, _)| page).collect())
    }

    /// Returns the address of the next store that waits. `None` if no store waits.
    pub fn next(&self) -> io::Result<Option<u64>> {
        let mut message = Message::default();
        // SAFETY: the buffer is a structure of integers with this size.
        let read = unsafe {
            let buffer = std::ptr::from_mut(&mut message).cast();
            libc::read(self.fd.as_raw_fd(), buffer, size_of::<Message>())
        };
        match read {
            0.. if message.event == UFFD_EVENT_PAGEFAULT => Ok(Some(message.address)),
            // No other events are requested.
            0.. => Err(io::ErrorKind::InvalidData.into()),
            _ => match io::Error::last_os_error() {
                err if err.kind() == io::ErrorKind::WouldBlock => Ok(None),
                err => Err(err),
            },
        }
    }

    /// Repeats the stores that wait for a range of addresses.
    pub fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        wake(&self.fd, start, len)
    }
}

impl std::os::fd::AsFd for Userfaults {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
