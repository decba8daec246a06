//! Tests of free chunks that do not read as zeros. A check should report them, and a repair should
//! erase them. `discard_damaged.rs` tests chunks that a volume may need.

use super::*;

/// Creates a pool with a raw volume in chunks 2 to 4.
fn with_volume(folder: &Path) -> Fixture {
    let fixture = Fixture { folder: TempDir::new_in(folder).unwrap() };
    let pool = fixture.create(32 * MIB, 0);
    pool.create_volume("v", VolumeSize::Bytes(6 * MIB), VolumeFormat::Raw).unwrap();
    pool.open_volume("v").unwrap().extents()[0]
        .run
        .extents()
        .for_each(|extent| fill(&pool, extent, 0x42));
    fixture
}

/// Returns a pool on tmpfs, and one in the current folder, which is probably on a disk.
fn fixtures() -> [Fixture; 2] {
    ["/dev/shm".into(), std::env::current_dir().unwrap()].map(|folder| with_volume(&folder))
}

fn not_erased(chunks: &[u32]) -> Vec<Finding> {
    chunks.iter().map(|chunk| Finding::NotErased { chunk: ChunkId(*chunk) }).collect()
}

#[test]
fn old_content_of_a_free_chunk_is_detected_and_erased() {
    for fixture in fixtures() {
        assert_eq!(fixture.check().pool, []);
        for chunk in [7, 9] {
            fixture.overwrite(ChunkId(chunk).offset_bytes() + CHUNK_BYTES - 1, b"x");
        }
        let report = fixture.check();
        assert_eq!(report.pool, not_erased(&[7, 9]));
        assert!(!report.is_clean());
        // Opening does not read the chunks, but a check of the open pool does.
        assert_eq!(fixture.open().check().unwrap().pool, not_erased(&[7, 9]));
        let dry = Pool::repair(&fixture.path(), true).unwrap();
        assert_eq!(fixture.check().pool, not_erased(&[7, 9]), "a dry run changes nothing");
        let done = Pool::repair(&fixture.path(), false).unwrap();
        assert_eq!((&dry.mended, &dry.left), (&done.mended, &done.left));
        assert!(
            done.mended.iter().any(|text| text
                .starts_with("2 free chunk(s) hold old content and are erased; the first is C7")),
            "{done:?}"
        );
        assert_eq!(done.left, [""; 0]);
        assert_eq!(fixture.check().pool, []);
        let pool = fixture.open();
        [7, 9].iter().for_each(|chunk| assert!(is_zero(&pool, Extent::chunk(ChunkId(*chunk)))));
        assert!(!is_zero(&pool, Extent::chunk(ChunkId(2))), "the volume keeps its content");
    }
}

#[test]
fn content_of_lent_or_waiting_chunks_is_not_a_finding() {
    for fixture in fixtures() {
        let pool = fixture.open();
        let lent = pool.alloc_memory(8 * MIB).unwrap();
        lent.iter().for_each(|extent| fill(&pool, *extent, 0x17));
        assert_eq!(pool.check().unwrap().pool, []);
        pool.free_memory(&lent).unwrap();
        assert_eq!(pool.check().unwrap().pool, []);
        pool.scrub_all().unwrap();
        assert_eq!(pool.check().unwrap().pool, []);
    }
}
