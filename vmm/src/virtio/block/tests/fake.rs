//! A disk in memory that can be made to fail.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::disk::range::{DiskRange, Unmap};
use crate::disk::{BlockDevice, Geometry, ResizeError};
use crate::memory::view::GuestView;

pub struct Fake {
    pub bytes: Mutex<Vec<u8>>,
    pub geometry: Geometry,
    pub fail_io: AtomicBool,
    pub fail_flush: AtomicBool,
    pub flushes: AtomicU64,
    /// What was not flushed yet.
    pub dirty: AtomicBool,
    /// Taken exclusively during each step, as a plug would.
    pub view: Mutex<Option<GuestView>>,
}

impl Fake {
    pub fn new(len: usize) -> Self {
        let geometry = Geometry {
            block_bytes: 512,
            physical_block_bytes: 4096,
            read_only: false,
            discard: true,
            unmap: true,
        };
        Self::with(len, geometry)
    }

    pub fn with(len: usize, geometry: Geometry) -> Self {
        Self {
            bytes: Mutex::new(vec![0; len]),
            geometry,
            fail_io: AtomicBool::new(false),
            fail_flush: AtomicBool::new(false),
            flushes: AtomicU64::new(0),
            dirty: AtomicBool::new(false),
            view: Mutex::new(None),
        }
    }

    fn step(&self) -> io::Result<()> {
        if let Some(view) = &*self.view.lock() {
            drop(view.exclusive());
        }
        match self.fail_io.load(Ordering::Relaxed) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        }
    }

    fn fill(&self, range: DiskRange, byte: u8) -> io::Result<()> {
        self.step()?;
        self.dirty.store(true, Ordering::Relaxed);
        let start = range.offset_bytes() as usize;
        self.bytes.lock()[start..start + range.len_bytes() as usize].fill(byte);
        Ok(())
    }
}

impl BlockDevice for Fake {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn size_bytes(&self) -> u64 {
        self.bytes.lock().len() as u64
    }
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        self.step()?;
        data.copy_from_slice(&self.bytes.lock()[offset_bytes as usize..][..data.len()]);
        Ok(())
    }
    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.step()?;
        self.dirty.store(true, Ordering::Relaxed);
        self.bytes.lock()[offset_bytes as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        match self.fail_flush.load(Ordering::Relaxed) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => {
                self.dirty.store(false, Ordering::Relaxed);
                Ok(())
            }
        }
    }
    fn discard(&self, range: DiskRange) -> io::Result<()> {
        self.fill(range, 0xdd)
    }
    fn write_zeroes(&self, range: DiskRange, _: Unmap) -> io::Result<()> {
        self.fill(range, 0)
    }
    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        self.bytes.lock().resize(wanted_bytes as usize, 0);
        Ok(())
    }
}
