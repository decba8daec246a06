//! Range locks of images that are open with O_DIRECT.

use std::thread;

use vmm_sys_util::eventfd::EFD_NONBLOCK;

use super::*;
use crate::disk::buffer::Buffer;

const IMAGE_BYTES: u64 = 1 << 20;
const SECTOR: u64 = SECTOR_BYTES;
const BLOCK: u64 = 4096;

/// Image on a fake host that accepts only blocks of 4096 bytes. `None` if O_DIRECT is not
/// supported.
fn direct_image() -> Option<(tempfile::TempDir, Arc<RawImage>)> {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("image");
    File::create(&path).unwrap().set_len(IMAGE_BYTES).unwrap();
    let options = ImageOptions { direct: true, sparse: true, ..ImageOptions::default() };
    let Ok(image) = RawImage::open(&path, options) else {
        eprintln!("skipped: the file system does not support O_DIRECT");
        return None;
    };
    image.direct.as_ref().unwrap().set_unit(BLOCK);
    Some((folder, image))
}

fn event() -> Arc<EventFd> {
    Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())
}

fn data(len: u64) -> Buffer {
    let mut buffer = Buffers::default().take(len as usize);
    buffer.bytes_mut().fill(7);
    buffer
}

/// Steps of each kind that change the given range.
fn changes(offset_bytes: u64, len_bytes: u64) -> [(&'static str, Step); 3] {
    [
        ("a write", Step::Write(offset_bytes, data(len_bytes))),
        ("zeros", Step::WriteZeroes(DiskRange::at(offset_bytes, len_bytes), Unmap::Allowed)),
        ("a discard", Step::Discard(DiskRange::at(offset_bytes, len_bytes))),
    ]
}

/// A read-modify-write cycle of the first sector rewrites the whole block, so no other step may
/// change the block.
#[test]
fn cycle_and_other_changes_of_its_block_exclude_each_other() {
    let Some((_folder, image)) = direct_image() else { return };
    let event = event();
    let cycle = image.lock_unaligned(SECTOR, SECTOR).unwrap();
    for (name, step) in changes(0, BLOCK) {
        assert!(image.lock_aligned(&step, &event).is_err(), "{name}");
    }
    for (name, mut step) in changes(0, SECTOR) {
        assert!(image.carry_out_unaligned(&mut step, &event).is_none(), "{name}");
    }
    drop(cycle);
    assert!(event.read().is_ok(), "the release did not raise the event");
    // The unit may grow during a read-modify-write cycle, so the cycle also locks the neighboring
    // blocks.
    for (whole_name, whole) in changes(BLOCK, BLOCK) {
        let guard = image.lock_aligned(&whole, &event).unwrap();
        assert!(guard.is_some(), "{whole_name}");
        assert!(
            image.lock_aligned(&whole, &event).is_ok(),
            "whole blocks must not exclude each other"
        );
        for (name, mut step) in changes(SECTOR, SECTOR) {
            assert!(
                image.carry_out_unaligned(&mut step, &event).is_none(),
                "{name} ran during {whole_name}"
            );
        }
    }
    for (name, mut step) in changes(SECTOR, SECTOR) {
        assert!(image.carry_out_unaligned(&mut step, &event).unwrap().is_ok(), "{name}");
    }
}

#[test]
fn calls_wait_for_a_cycle_of_the_same_block() {
    let Some((_folder, image)) = direct_image() else { return };
    let locks = image.direct.as_ref().unwrap().locks();
    type Call = fn(&RawImage) -> io::Result<()>;
    let calls: [(&str, Call); 3] = [
        ("a write of a block", |image| BlockDevice::write(image, 0, data(BLOCK).bytes())),
        ("a write of a sector", |image| BlockDevice::write(image, 0, data(SECTOR).bytes())),
        ("zeros", |image| {
            BlockDevice::write_zeroes(image, DiskRange::at(0, SECTOR), Unmap::Forbidden)
        }),
    ];
    for (name, call) in calls {
        let cycle = image.lock_unaligned(SECTOR, SECTOR).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| call(&image).unwrap());
            while !locks.has_waiter() {
                assert!(!waiter.is_finished(), "{name} did not wait");
                thread::yield_now();
            }
            drop(cycle);
        });
    }
}
