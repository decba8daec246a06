//! Barrier at which all accesses to a part of guest memory wait while its content is moved.
//!
//! The part is replaced by empty memory whose faults userfaultfd(2) reports. vCPUs, devices and the
//! kernel wait there until other memory takes its place. The empty memory must be registered before
//! an access can reach it, so it is registered elsewhere and moved over the part. Under the lock of
//! the address space, mremap(2) removes the pages of the part, also from KVM's page tables, and
//! moves the registration (Linux mm/mremap.c, `mremap_to`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use thiserror::Error;

use super::Reservation;
use crate::log::rate_limited;
use crate::memory::holes::UserfaultDevice;
use crate::memory::holes::userfault::{
    UFFD_FEATURE_EVENT_REMAP, UFFDIO_REGISTER_MODE_MISSING, handshake, register, wake,
};
use crate::pool::CHUNK_BYTES;

/// Reason why memory cannot be moved to files.
#[derive(Debug, Error)]
#[error("spill_file needs userfaultfd: {reason}; omit it to move memory to DRAM")]
pub struct BarrierError {
    reason: String,
}

impl From<io::Error> for BarrierError {
    fn from(err: io::Error) -> Self {
        Self { reason: err.to_string() }
    }
}

/// Barrier for one chunk of guest memory at a time.
#[derive(Debug)]
pub struct AccessBarrier {
    userfaults: Arc<OwnedFd>,
    empty: Reservation,
    end: Arc<OwnedFd>,
    /// `None` while the value is dropped.
    thread: Option<JoinHandle<()>>,
    /// Broken variant: accesses do not wait.
    #[cfg(test)]
    pub(super) is_open: std::sync::atomic::AtomicBool,
}

impl AccessBarrier {
    pub fn new(device: &UserfaultDevice) -> Result<Self, BarrierError> {
        if let Some(reason) = device.refusal() {
            return Err(BarrierError { reason });
        }
        // Without this feature, mremap() ends the registration (fs/userfaultfd.c,
        // mremap_userfaultfd_prep).
        Self::with_features(device, UFFD_FEATURE_EVENT_REMAP)
    }

    pub(super) fn with_features(
        device: &UserfaultDevice,
        features: u64,
    ) -> Result<Self, BarrierError> {
        let userfaults = Arc::new(device.context()?);
        handshake(&userfaults, features)?;
        let empty = Reservation::new(CHUNK_BYTES, CHUNK_BYTES)?;
        empty.map_anonymous(0, CHUNK_BYTES)?;
        register(&userfaults, empty.addr(), CHUNK_BYTES, UFFDIO_REGISTER_MODE_MISSING)?;
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?);
        let (fds, name) = ([Arc::clone(&userfaults), Arc::clone(&end)], "_barrier");
        let thread = spawn_confined(ThreadKind::Memory, name, move || read_events(&fds))?;
        Ok(Self {
            userfaults,
            empty,
            end,
            thread: Some(thread),
            #[cfg(test)]
            is_open: Default::default(),
        })
    }

    /// Replaces the chunk at `offset` by the barrier. An error may leave the chunk unmapped.
    pub(super) fn raise(&self, zone: &Reservation, offset: u64) -> io::Result<()> {
        #[cfg(test)]
        if self.is_open.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(());
        }
        zone.replace_by(offset, &self.empty)
    }

    /// Repeats the accesses that wait for the chunk at `offset`. Other memory must be mapped in its
    /// place.
    pub(super) fn lower(&self, zone: &Reservation, offset: u64) {
        if let Err(err) = wake(&self.userfaults, zone.addr() + offset, CHUNK_BYTES) {
            rate_limited!(error, %err, "Cannot wake accesses to moved memory");
        }
    }
}

impl Drop for AccessBarrier {
    fn drop(&mut self) {
        rustix::io::write(&*self.end, &1u64.to_ne_bytes()).expect("an open eventfd");
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Reads events until the barrier is dropped. The thread that raises the barrier waits until the
/// event is read (fs/userfaultfd.c, userfaultfd_event_wait_completion), so another thread must read
/// it. Reports of faults need no answer.
fn read_events([userfaults, end]: &[Arc<OwnedFd>; 2]) {
    let mut events = [0; 1024];
    loop {
        let mut fds = [userfaults, end].map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return,
            Ok(_) | Err(Errno::INTR) => {}
            Err(err) => unreachable!("poll of own descriptors: {err}"),
        }
        match rustix::io::read(userfaults, &mut events) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(err) => rate_limited!(error, %err, "Cannot read events of moved memory"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_device_is_reported_with_the_way_around_it() {
        let error = AccessBarrier::new(&UserfaultDevice::missing()).unwrap_err().to_string();
        assert!(error.starts_with("spill_file needs userfaultfd: cannot open /dev/userfaultfd"));
        assert!(error.ends_with("; omit it to move memory to DRAM"), "{error}");
    }
}
