use parking_lot::Mutex;

use super::*;

const SIZE: u64 = 256 << 10;

/// Fake media that refuse transfers of partial units. The unit can grow, and the units of reads and
/// writes can differ.
struct Media {
    bytes: Mutex<Vec<u8>>,
    read_unit: AtomicU64,
    write_unit: AtomicU64,
}

impl Media {
    fn new(size: u64, read_unit: u64, write_unit: u64) -> Self {
        let bytes = Mutex::new(pattern(size as usize));
        Self { bytes, read_unit: AtomicU64::new(read_unit), write_unit: AtomicU64::new(write_unit) }
    }

    fn check(unit: &AtomicU64, offset: u64, data: &[u8]) -> io::Result<()> {
        let all = offset | data.len() as u64;
        let page_aligned = data.as_ptr().addr().is_multiple_of(512);
        match all.is_multiple_of(unit.load(Ordering::Relaxed)) && page_aligned {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512) as u8 ^ at as u8).collect()
}

impl ReadWriteAt for Media {
    fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<usize> {
        Self::check(&self.read_unit, offset, data)?;
        let bytes = self.bytes.lock();
        let rest = &bytes[(offset as usize).min(bytes.len())..];
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn read_exact_at(&self, data: &mut [u8], offset: u64) -> io::Result<()> {
        let len = self.read_at(data, offset)?;
        if len == data.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        Self::check(&self.write_unit, offset, data)?;
        self.bytes.lock()[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }
}

/// Offsets and lengths of transfers that start and end around the edges of units of up to 64 KiB.
fn transfers() -> Vec<(u64, u64)> {
    let edges = [0, 512, 3584, 4096, 4608, 65024, 65536, 66048, SIZE - 4096, SIZE - 512, SIZE];
    let pairs = edges.iter().flat_map(|from| edges.iter().map(move |to| (*from, *to)));
    pairs.filter(|(from, to)| from < to).map(|(from, to)| (from, to - from)).collect()
}

fn assert_served(direct: &DirectIo, media: &Media) {
    for (offset, len) in transfers() {
        let mut expected = media.bytes.lock().clone();
        let mut data = Buffers::default().take(len as usize);
        direct.read(media, offset, data.bytes_mut()).unwrap();
        assert!(
            data.bytes() == &expected[offset as usize..][..len as usize],
            "read {offset}+{len}"
        );
        data.bytes_mut().iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        direct.write(media, offset, data.bytes()).unwrap();
        expected[offset as usize..][..len as usize].copy_from_slice(data.bytes());
        assert!(*media.bytes.lock() == expected, "write {offset}+{len}");
    }
}

#[test]
fn unaligned_transfers_are_served_with_every_unit() {
    for unit in [512, 1024, 4096, UNIT_BYTES_MAX] {
        let media = Media::new(SIZE, unit, unit);
        let direct = DirectIo::with_unit(None, probe(&media, SIZE));
        assert_eq!(direct.unit_bytes(), unit);
        assert_served(&direct, &media);
        assert_eq!(direct.unit_bytes(), unit);
    }
}

#[test]
fn unit_grows_when_the_host_begins_to_refuse() {
    let media = Media::new(SIZE, 512, 512);
    let direct = DirectIo::with_unit(None, probe(&media, SIZE));
    assert!(direct.is_aligned(512, 512));
    media.read_unit.store(4096, Ordering::Relaxed);
    media.write_unit.store(4096, Ordering::Relaxed);
    assert_served(&direct, &media);
    assert_eq!(direct.unit_bytes(), 4096);
    assert!(!direct.is_aligned(512, 4096) && direct.is_aligned(4096, 8192));
    // The probe only reads, so it does not detect that writes are refused.
    let media = Media::new(SIZE, 512, 4096);
    let direct = DirectIo::with_unit(None, probe(&media, SIZE));
    assert_eq!(direct.unit_bytes(), 512);
    assert_served(&direct, &media);
}

#[test]
fn refusals_for_other_reasons_stay_errors_and_change_nothing() {
    let media = Media::new(SIZE, 512, 1 << 40);
    let direct = DirectIo::with_unit(None, 512);
    let buffer = Buffers::default().take(4096);
    let refused = direct.write(&media, 0, buffer.bytes()).unwrap_err();
    assert_eq!((refused.raw_os_error(), direct.unit_bytes()), (Some(libc::EINVAL), 512));
    let mut buffer = Buffers::default().take(4096);
    let beyond = direct.read(&media, SIZE, buffer.bytes_mut()).unwrap_err();
    assert_eq!((beyond.kind(), direct.unit_bytes()), (io::ErrorKind::UnexpectedEof, 512));
}

#[test]
fn probe_reads_more_than_the_start() {
    /// Fake media that refuse small reads in the second half.
    struct Grown;
    impl ReadWriteAt for Grown {
        fn read_at(&self, data: &mut [u8], offset: u64) -> io::Result<usize> {
            let unit = if offset < SIZE / 2 { 512 } else { 4096 };
            match (offset | data.len() as u64).is_multiple_of(unit) {
                true => Ok(data.len()),
                false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            }
        }
        fn read_exact_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn write_all_at(&self, _: &[u8], _: u64) -> io::Result<()> {
            unreachable!()
        }
    }
    assert_eq!(probe(&Grown, SIZE), 4096);
    // Images of a few sectors, and media errors.
    assert_eq!(probe(&Media::new(512, 512, 512), 512), 512);
    assert_eq!(probe(&Media::new(512, 4096, 4096), 512), 4096);
}

#[test]
fn partial_unit_at_the_end_of_a_file_is_served_and_keeps_its_size() {
    let size = SIZE + 512;
    let file = tempfile::tempfile().unwrap();
    FileExt::write_all_at(&file, &pattern(size as usize), 0).unwrap();
    // Media that end with the last whole unit, so that a direct transfer of the rest would fail.
    let media = Media::new(SIZE, 4096, 4096);
    let direct = DirectIo::with_unit(Some(Buffered::open(&file, true).unwrap()), 4096);
    let mut data = Buffers::default().take(1024);
    FileExt::write_all_at(&file, &[0xff; 1024], 0).unwrap();
    direct.read(&media, 0, data.bytes_mut()).unwrap();
    assert_ne!(data.bytes(), [0xff; 1024], "whole units used the page cache");
    for offset in [SIZE - 512, SIZE] {
        let len = (size - offset) as usize;
        direct.read(&media, offset, &mut data.bytes_mut()[..len]).unwrap();
        assert_eq!(&data.bytes()[..len], &pattern(size as usize)[offset as usize..]);
    }
    data.bytes_mut().fill(9);
    direct.write(&media, SIZE - 512, data.bytes()).unwrap();
    assert_eq!(media.bytes.lock()[SIZE as usize - 512..], [9; 512]);
    let mut tail = [0; 512];
    FileExt::read_exact_at(&file, &mut tail, SIZE).unwrap();
    assert_eq!((tail, file.metadata().unwrap().len()), ([9; 512], size));
}

/// Without the lock, concurrent read-modify-write cycles of neighboring sectors lose writes.
#[test]
fn concurrent_writes_of_neighboring_sectors_are_all_kept() {
    let media = Media::new(4096, 4096, 4096);
    let direct = DirectIo::with_unit(None, 4096);
    std::thread::scope(|scope| {
        for sector in 0..8u8 {
            let (media, direct) = (&media, &direct);
            scope.spawn(move || {
                let mut data = Buffers::default().take(512);
                for round in 0..2000u32 {
                    data.bytes_mut().fill(round as u8);
                    let offset = u64::from(sector) * 512;
                    direct.write(media, offset, data.bytes()).unwrap();
                    direct.read(media, offset, data.bytes_mut()).unwrap();
                    assert!(
                        data.bytes().iter().all(|byte| *byte == round as u8),
                        "sector {sector}"
                    );
                }
            });
        }
    });
}
