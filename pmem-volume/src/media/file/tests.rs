//! Tests of media in files on tmpfs and on a disk.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::super::recorded_ops::{RecordedOp, not_durable, record_ops};
use super::*;
use crate::media::MAX_MAPPED_BYTES;

fn media_in(folder: &Path, len_bytes: u64) -> FileMedia {
    let file = tempfile::tempfile_in(folder).unwrap();
    allocate(&file, 0..len_bytes, false, &mut ignore_progress).unwrap();
    FileMedia::new(file, len_bytes, true).unwrap()
}

fn tempfile_of(len_bytes: u64) -> File {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(len_bytes).unwrap();
    file
}

fn erase(media: &FileMedia, range: Range<u64>) -> Result<(), MediaError> {
    media.erase(std::slice::from_ref(&range))
}

/// Returns a folder on tmpfs, and the current folder, which is probably on a disk.
fn folders() -> Vec<std::path::PathBuf> {
    vec!["/dev/shm".into(), std::env::current_dir().unwrap()]
}

#[test]
fn stores_are_visible_and_can_be_persisted() {
    for folder in folders() {
        let media = media_in(&folder, 2 * CHUNK_BYTES);
        media.store(CHUNK_BYTES + 3, b"abc").unwrap();
        media.store_word(64, 0x0102_0304_0506_0708).unwrap();
        media.persist(&[0..72, CHUNK_BYTES..CHUNK_BYTES + 6]).unwrap();
        let mut back = [0; 3];
        media.read(CHUNK_BYTES + 3, &mut back).unwrap();
        assert_eq!(&back, b"abc");
        assert_eq!(media.load_word(64).unwrap(), 0x0102_0304_0506_0708);
    }
}

#[test]
fn long_bulk_stores_are_seen_by_loads_and_reads_and_make_no_file_longer() {
    for folder in folders() {
        let media = media_in(&folder, 2 * CHUNK_BYTES);
        let bytes: Vec<u8> = (0..MIN_PWRITE_BYTES + 64).map(|at| (at / 61) as u8).collect();
        let mut pending = Pending::default();
        media.store_bulk(4096, &bytes, &mut pending).unwrap();
        media.end_persist(&pending).unwrap();
        let mut back = vec![0; bytes.len()];
        media.read(4096, &mut back).unwrap();
        assert!(back == bytes);
        media.load(4096, &mut back).unwrap();
        assert!(back == bytes);
        media.file().set_len(CHUNK_BYTES).unwrap();
        let mut pending = Pending::default();
        let error = media.store_bulk(CHUNK_BYTES, &bytes, &mut pending).unwrap_err();
        assert!(foreshore_types::chain(&error).contains("the file was truncated"), "{error}");
        assert_eq!(media.file().metadata().unwrap().len(), CHUNK_BYTES);
    }
    let reading = FileMedia::new(tempfile_of(CHUNK_BYTES), CHUNK_BYTES, false).unwrap();
    let refused = reading.store_bulk(0, &[0; MIN_PWRITE_BYTES], &mut Pending::default());
    assert!(matches!(refused, Err(MediaError::ReadOnly)));
}

/// Makes stores and begins their persist. The caller ends the persist.
type Begin = fn(&FileMedia, &mut Pending);

const BEGINNINGS: [(&str, Begin); 4] = [
    ("a word", |media, pending| {
        media.store_word(4096, 1).unwrap();
        media.begin_persist(4096..4104, pending).unwrap();
    }),
    ("bytes in three lines", |media, pending| {
        media.store(60, &[1; 70]).unwrap();
        media.begin_persist(60..130, pending).unwrap();
    }),
    ("whole lines", |media, pending| media.store_bulk(8192, &[1; 4096], pending).unwrap()),
    ("parts of lines", |media, pending| media.store_bulk(8, &[1; 4096], pending).unwrap()),
];

#[test]
fn begun_persists_on_dax_are_durable_after_the_end() {
    let media = media_in(Path::new("/dev/shm"), CHUNK_BYTES).with_dax_persists();
    for (case, begin) in BEGINNINGS {
        let mut pending = Pending::default();
        let begun = record_ops(|| begin(&media, &mut pending));
        assert!(!not_durable(&begun).is_empty(), "{case}: the end has work to do");
        let ended = record_ops(|| media.end_persist(&pending).unwrap());
        let left = not_durable(&[begun, ended].concat());
        assert!(left.is_empty(), "{case}: {left:x?}");
    }
    let stored = record_ops(|| {
        media.store(60, &[1; 70]).unwrap();
        media.store_word(4096, 1).unwrap();
        media.persist(&[60..130, 4096..4104]).unwrap();
    });
    assert!(not_durable(&stored).is_empty(), "persisted at once: {stored:x?}");
}

/// If a process dies, its cached stores remain. Non-temporal stores must therefore be ordered
/// before later stores.
#[test]
fn end_of_a_persist_on_volatile_media_orders_non_temporal_stores() {
    let media = media_in(Path::new("/dev/shm"), CHUNK_BYTES);
    assert_eq!(media.durability(), Durability::Volatile);
    for (case, begin) in BEGINNINGS {
        let mut pending = Pending::default();
        let ops = record_ops(|| {
            begin(&media, &mut pending);
            media.end_persist(&pending).unwrap();
        });
        let streamed = ops.iter().rposition(|op| matches!(op, RecordedOp::Streamed(_)));
        let fenced = ops.iter().rposition(|op| *op == RecordedOp::Fenced);
        assert_eq!(streamed.is_some(), case == "whole lines", "{case}: {ops:x?}");
        assert_eq!(fenced.is_some(), streamed.is_some(), "{case}: {ops:x?}");
        assert!(fenced >= streamed, "{case}: {ops:x?}");
    }
}

#[test]
fn only_erased_chunks_read_as_zeros() {
    for folder in folders() {
        let media = media_in(&folder, 3 * CHUNK_BYTES);
        for chunk in 0..3 {
            media.store(chunk * CHUNK_BYTES, &vec![0xaa; CHUNK_BYTES as usize]).unwrap();
        }
        erase(&media, CHUNK_BYTES..2 * CHUNK_BYTES).unwrap();
        let mut back = vec![0; 3 * CHUNK_BYTES as usize];
        media.read(0, &mut back).unwrap();
        for (chunk, bytes) in back.chunks(CHUNK_BYTES as usize).enumerate() {
            let expected = if chunk == 1 { 0 } else { 0xaa };
            assert!(bytes.iter().all(|b| *b == expected), "chunk {chunk} in {}", folder.display());
        }
    }
}

#[test]
fn tmpfs_is_volatile_and_frees_erased_blocks() {
    let media = media_in(Path::new("/dev/shm"), 2 * CHUNK_BYTES);
    assert_eq!(media.durability(), Durability::Volatile);
    media.store(0, &vec![1; 2 * CHUNK_BYTES as usize]).unwrap();
    assert_eq!(media.file().metadata().unwrap().blocks() * 512, 2 * CHUNK_BYTES);
    erase(&media, 0..CHUNK_BYTES).unwrap();
    assert_eq!(media.file().metadata().unwrap().blocks() * 512, CHUNK_BYTES);
}

#[test]
fn file_on_disk_keeps_all_blocks_when_erased() {
    let folder = std::env::current_dir().unwrap();
    let media = media_in(&folder, 2 * CHUNK_BYTES);
    if media.durability() != Durability::PageCache {
        eprintln!("skipped: {} is {}", folder.display(), media.durability().name());
        return;
    }
    erase(&media, 0..CHUNK_BYTES).unwrap();
    assert!(media.file().metadata().unwrap().blocks() * 512 >= 2 * CHUNK_BYTES);
}

fn grow(media: &FileMedia, len_bytes: u64) {
    media.grow(media.len_bytes()..len_bytes, None, &mut ignore_progress).unwrap();
}

#[test]
fn media_grows_while_its_addresses_are_in_use_and_its_tail_can_be_cut() {
    for folder in folders() {
        let media = media_in(&folder, CHUNK_BYTES);
        media.store_word(8, 7).unwrap();
        media.file().set_len(3 * CHUNK_BYTES).unwrap();
        media.truncate_tail().unwrap();
        assert_eq!(media.file().metadata().unwrap().len(), CHUNK_BYTES);
        let before = media.mapping.start();
        grow(&media, 3 * CHUNK_BYTES);
        assert_eq!(media.load_word(2 * CHUNK_BYTES).unwrap(), 0);
        media.store_word(8, 9).unwrap();
        // SAFETY: the word is inside the first mapping, which remains.
        assert_eq!(unsafe { before.add(8).cast::<u64>().read_volatile() }, 9);
    }
}

#[test]
fn media_beyond_the_address_space_is_refused_with_the_reason() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(MAX_MAPPED_BYTES + CHUNK_BYTES).unwrap();
    let mapped = FileMedia::new(file.try_clone().unwrap(), MAX_MAPPED_BYTES, false);
    drop(mapped.expect("a process can map the maximum"));
    let error = FileMedia::new(file, MAX_MAPPED_BYTES + CHUNK_BYTES, false).err().unwrap();
    let MediaError::Io { source, .. } = error else { panic!("{error}") };
    assert!(source.to_string().contains("64 TiB"), "{source}");
}

#[test]
fn read_only_media_refuses_stores() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    allocate(&file, 0..CHUNK_BYTES, false, &mut ignore_progress).unwrap();
    let media = FileMedia::new(file, CHUNK_BYTES, false).unwrap();
    assert!(matches!(media.store(0, &[1]), Err(MediaError::ReadOnly)));
    assert!(matches!(media.store_word(0, 1), Err(MediaError::ReadOnly)));
    assert!(matches!(erase(&media, 0..CHUNK_BYTES), Err(MediaError::ReadOnly)));
    assert_eq!(media.load_word(0).unwrap(), 0);
}

/// Returns the flags of the mapping at `start` (VmFlags in proc_pid_smaps(5)).
fn mapping_flags(start: *mut u8) -> String {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| {
        let range = line.split_once('-').map(|(start, _)| u64::from_str_radix(start, 16));
        range != Some(Ok(start as u64))
    });
    lines.find_map(|line| line.strip_prefix("VmFlags: ")).expect("a mapping").to_owned()
}

#[test]
fn core_dumps_exclude_mapped_files() {
    for folder in folders() {
        let media = media_in(&folder, CHUNK_BYTES);
        let read_only =
            FileMedia::new(media.file().try_clone().unwrap(), CHUNK_BYTES, false).unwrap();
        let old = media.mapping.start();
        grow(&media, 2 * CHUNK_BYTES);
        for start in [old, media.mapping.start(), read_only.mapping.start()] {
            let flags = mapping_flags(start);
            assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
        }
    }
}
