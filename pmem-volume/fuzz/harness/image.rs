//! Sparse content of a file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

pub(super) const CHUNK_BYTES: u64 = pmem_volume::CHUNK_BYTES;
const PAGE_BYTES: u64 = 4096;
const ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// Sparse content. Missing pages are zero.
#[derive(Clone, Default)]
pub(super) struct Image {
    pub len_bytes: u64,
    pages: BTreeMap<u64, [u8; PAGE_BYTES as usize]>,
}

impl Image {
    pub(super) fn read(&self, offset_bytes: u64, into: &mut [u8]) {
        let (mut at, mut rest) = (offset_bytes, into);
        while !rest.is_empty() {
            let within = (at % PAGE_BYTES) as usize;
            let (now, later) = rest.split_at_mut(rest.len().min(PAGE_BYTES as usize - within));
            match self.pages.get(&(at / PAGE_BYTES)) {
                Some(page) => now.copy_from_slice(&page[within..within + now.len()]),
                None => now.fill(0),
            }
            at += now.len() as u64;
            rest = later;
        }
    }

    /// Checks that a range of whole pages is zero.
    pub(super) fn is_zero(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let pages = offset_bytes / PAGE_BYTES..(offset_bytes + len_bytes).div_ceil(PAGE_BYTES);
        self.pages.range(pages).all(|(_, page)| *page == ZEROS)
    }

    pub(super) fn bytes<const COUNT: usize>(&self, offset_bytes: u64) -> [u8; COUNT] {
        let mut bytes = [0; COUNT];
        self.read(offset_bytes, &mut bytes);
        bytes
    }

    /// Writes bytes. Bytes past the end of the image are dropped.
    pub(super) fn write(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let inside = self.len_bytes.saturating_sub(offset_bytes).min(bytes.len() as u64) as usize;
        let (mut at, mut rest) = (offset_bytes, &bytes[..inside]);
        while !rest.is_empty() {
            let within = (at % PAGE_BYTES) as usize;
            let (now, later) = rest.split_at(rest.len().min(PAGE_BYTES as usize - within));
            let number = at / PAGE_BYTES;
            if self.pages.contains_key(&number) || now != &ZEROS[..now.len()] {
                self.pages.entry(number).or_insert(ZEROS)[within..within + now.len()]
                    .copy_from_slice(now);
            }
            at += now.len() as u64;
            rest = later;
        }
    }

    pub(super) fn write_word(&mut self, offset_bytes: u64, word: u64) {
        self.write(offset_bytes, &word.to_le_bytes());
    }

    pub(super) fn set_len(&mut self, len_bytes: u64) {
        self.len_bytes = len_bytes;
        self.pages.split_off(&len_bytes.div_ceil(PAGE_BYTES));
        if let Some(last) = self.pages.get_mut(&(len_bytes / PAGE_BYTES)) {
            last[(len_bytes % PAGE_BYTES) as usize..].fill(0);
        }
    }

    /// Reads the content of a file on tmpfs, which reports its holes.
    pub(super) fn of_file(file: &File) -> io::Result<Self> {
        let mut image = Self { len_bytes: file.metadata()?.len(), ..Self::default() };
        let mut at = 0;
        while let Some(start) = seek(file, at, libc::SEEK_DATA)? {
            let end = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(image.len_bytes);
            for page in start / PAGE_BYTES..end.div_ceil(PAGE_BYTES) {
                let mut bytes = ZEROS;
                let wanted = (image.len_bytes - page * PAGE_BYTES).min(PAGE_BYTES) as usize;
                file.read_exact_at(&mut bytes[..wanted], page * PAGE_BYTES)?;
                image.pages.insert(page, bytes);
            }
            at = end;
        }
        image.pages.retain(|_, page| *page != ZEROS);
        Ok(image)
    }

    /// Replaces the content of a file.
    pub(super) fn to_file(&self, file: &File) -> io::Result<()> {
        file.set_len(0)?;
        file.set_len(self.len_bytes)?;
        for (page, bytes) in &self.pages {
            let wanted = (self.len_bytes - page * PAGE_BYTES).min(PAGE_BYTES) as usize;
            file.write_all_at(&bytes[..wanted], page * PAGE_BYTES)?;
        }
        Ok(())
    }
}

impl PartialEq for Image {
    /// Compares images. Pages of zeros are equal to missing pages.
    fn eq(&self, other: &Self) -> bool {
        let [this, that] =
            [self, other].map(|image| image.pages.iter().filter(|(_, page)| **page != ZEROS));
        self.len_bytes == other.len_bytes && this.eq(that)
    }
}

/// Returns the next data or hole at or after an offset. Returns `None` after the last data.
fn seek(file: &File, from: u64, what: i32) -> io::Result<Option<u64>> {
    // SAFETY: lseek() takes only numbers, and the descriptor lives as long as `file`.
    match unsafe { libc::lseek(file.as_raw_fd(), from as i64, what) } {
        at if at >= 0 => Ok(Some(at as u64)),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}
