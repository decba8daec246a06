//! Flips of every bit in every field of every structure, with the old checksum and with an updated
//! one. The expected outcomes are listed for each field. If opening is refused, the pool should not
//! change. If it succeeds, the bytes by state should add up.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::ops::Range;

use zerocopy::FromZeros;

use super::crash::{fill_volume, new_pool_of, open, open_for};
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::mirrored::Mirrored;
use crate::pool::format::table::{Owner, Slot, encode_owner, seal_for_test};
use crate::pool::layout::{
    CHUNK_TABLE_OFFSET, LOG_OFFSET, LogEntryBytes, LogHeaderBytes, SUPERBLOCK_OFFSETS,
    SuperblockBytes, VOLUME_TABLE_OFFSETS, VolumeRecordBytes,
};

/// Name of a field and range of its bits.
type Field = (&'static str, Range<usize>);

/// Returns all fields of a structure, based on its definition. Fails if a field is missing or
/// misplaced.
macro_rules! fields {
    ($type:ty: $($field:ident),*) => {{
        let zeroed = <$type>::new_zeroed();
        let bits = |start: usize, bytes: usize| start * 8..(start + bytes) * 8;
        let fields: Vec<Field> = vec![
            $((stringify!($field), bits(offset_of!($type, $field), size_of_val(&zeroed.$field)))),*
        ];
        let ends = [0].into_iter().chain(fields.iter().map(|(_, bits)| bits.end));
        assert!(ends.eq(fields.iter().map(|(_, bits)| bits.start).chain([size_of::<$type>() * 8])));
        fields
    }};
}

fn superblock_fields() -> Vec<Field> {
    fields!(SuperblockBytes: magic, version, superblock_bytes, features_compatible, features_read_only,
        features_incompatible, sequence, uuid, size_bytes, chunk_bytes, strg_bytes, chunk_table_offset,
        chunk_table_entries, volume_table_offsets, volume_slots, volume_record_bytes, log_offset, log_bytes,
        created_unix_s, growing_to_bytes, reserved0, mbr_id, reserved1, mbr_partitions, mbr_signature,
        reserved2, checksum)
}

fn record_fields() -> Vec<Field> {
    fields!(VolumeRecordBytes: magic, sequence, slot, state, format, name_bytes, reserved0, flags, uuid,
        size_bytes, created_unix_s, name, origin_slot, origin_index, unreserved_bytes, reserved1, checksum)
}

fn log_fields() -> Vec<Field> {
    fields!(LogHeaderBytes: magic, entries, checksum, commit, reserved)
}

fn log_entry_fields() -> Vec<Field> {
    fields!(LogEntryBytes: offset, word)
}

/// Returns the fields of an owner word, as in docs/reference/format.md.
fn owner_fields() -> Vec<Field> {
    vec![("index", 0..28), ("slot", 28..44), ("state", 44..48), ("check", 48..64)]
}

/// Returns the fields of a wear word.
fn wear_fields() -> Vec<Field> {
    vec![("count", 0..18), ("owner", 18..48), ("check", 48..64)]
}

/// Removes the checksum, because it would be corrected again.
fn without_checksum(mut fields: Vec<Field>) -> Vec<Field> {
    fields.retain(|(name, _)| !["checksum", "check"].contains(name));
    fields
}

/// Creates a pool with a volume in chunks 2 to 4, and another one in chunk 5.
fn sample() -> Simulator {
    let (media, pool) = new_pool_of(12, |superblock| {
        superblock.strg_bytes = 4 * CHUNK_BYTES;
        superblock.volume_slots = 4;
        superblock.log_bytes = 4096;
    });
    for (name, chunks) in [("v", 3), ("w", 1)] {
        pool.create_volume(name, VolumeSize::Bytes(chunks * CHUNK_BYTES), VolumeFormat::Raw)
            .unwrap();
        fill_volume(&media, &pool, name);
    }
    drop(pool);
    media.persist_range(0..media.len_bytes()).unwrap();
    media
}

fn copy_of(media: &Simulator) -> Simulator {
    media.record();
    let now = media.take_points().pop().expect("one for now");
    now.images(1, &mut Random::new(0)).pop().expect("an image")
}

/// Returns the name of the error's variant, and the superblock field if there is one.
fn name_of(error: &PoolError) -> String {
    match error {
        PoolError::SuperblockInvalid { source, .. } => {
            format!("SuperblockInvalid {}", source.field)
        }
        PoolError::Damaged { first, .. } => {
            format!("Damaged {}", format!("{first:?}").split([' ', '{']).next().unwrap_or_default())
        }
        other => format!("{other:?}").split([' ', '{', '(']).next().unwrap_or_default().to_owned(),
    }
}

/// Opens an image for reading and for writing, and returns the outcome in one word.
fn outcome(image: &Simulator) -> String {
    let before = image.content();
    for mode in [OpenMode::ReadOnly, OpenMode::Peek] {
        if let Ok(pool) = open_for(image, mode) {
            assert_states_add_up(&pool.info());
            pool.check().unwrap();
        }
    }
    assert!(before == image.content(), "the check changed the media");
    match open(image) {
        Err(error) => {
            assert!(before == image.content(), "a refused open changed the media: {error}");
            let text = error.to_string();
            assert!(
                text.contains("nothing was changed") || text.contains("use "),
                "no advice in {text:?}"
            );
            name_of(&error)
        }
        Ok(pool) => {
            assert_states_add_up(&pool.info());
            let findings = pool.findings_at_open();
            assert!(findings.iter().all(|f| f.severity() < Severity::Fatal), "{findings:?}");
            // A word with a correct checksum can mark a chunk that contains data as free.
            let found = pool.check().unwrap().pool;
            assert!(found.iter().all(|f| matches!(f, Finding::NotErased { .. })), "{found:?}");
            let names: BTreeSet<_> = findings
                .iter()
                .map(|f| format!("{f:?}").split([' ', '{']).next().unwrap_or_default().to_owned())
                .collect();
            match pool.volumes().len() {
                2 => format!("opens {}", names.into_iter().collect::<Vec<_>>().join(" "))
                    .trim()
                    .to_owned(),
                volumes => format!("opens with {volumes} volumes"),
            }
        }
    }
}

/// Outcomes of flipping the bits of each field.
type Outcomes = BTreeMap<&'static str, BTreeSet<String>>;

fn outcomes(media: &Simulator, fields: &[Field], flip: &dyn Fn(&Simulator, usize)) -> Outcomes {
    let mut observed = Outcomes::new();
    for (name, bits) in fields {
        // Only a sample of the bits in reserved fields is flipped, because these bits do not differ
        // in meaning.
        let step = if bits.len() > 512 { 61 } else { 1 };
        for bit in bits.clone().step_by(step) {
            let image = copy_of(media);
            flip(&image, bit);
            observed.entry(*name).or_default().insert(outcome(&image));
        }
    }
    observed
}

fn flip_bit(media: &Simulator, start: u64, bit: usize) {
    let at = start + bit as u64 / 64 * 8;
    media.store_word(at, media.load_word(at).unwrap() ^ 1 << (bit % 64)).unwrap();
}

/// Flips a bit in both copies of a record, and updates their checksums.
fn flip_and_seal<T: Mirrored>(media: &Simulator, copies: [u64; 2], bit: usize) {
    for start in copies {
        flip_bit(media, start, bit);
        let mut bytes = vec![0; size_of::<T>()];
        media.read(start, &mut bytes).unwrap();
        let mut record = T::read_from_bytes(&bytes).unwrap();
        mirrored::seal(&mut record);
        media.store(start, record.as_bytes()).unwrap();
    }
}

type Expected = &'static [(&'static str, &'static [&'static str])];

/// Compares the outcomes, and prints differences for each field. All fields must be listed.
fn assert_outcomes(case: &str, observed: &Outcomes, expected: Expected) {
    let expected: Outcomes = expected
        .iter()
        .map(|(field, outcomes)| {
            (*field, outcomes.iter().map(|outcome| (*outcome).to_owned()).collect())
        })
        .collect();
    for (field, outcomes) in observed {
        assert_eq!(Some(outcomes), expected.get(field), "{case}: {field}");
    }
    assert_eq!(observed.len(), expected.len(), "{case}: a field is gone");
}

/// Checks that all fields have the same outcome.
fn assert_all(case: &str, observed: &Outcomes, expected: &str) {
    for (field, outcomes) in observed {
        assert_eq!(outcomes.iter().collect::<Vec<_>>(), [expected], "{case}: {field}");
    }
}

fn flip_superblocks(media: &Simulator, bit: usize) {
    flip_and_seal::<SuperblockBytes>(media, SUPERBLOCK_OFFSETS, bit);
}

fn flip_records(media: &Simulator, bit: usize) {
    flip_and_seal::<VolumeRecordBytes>(media, VOLUME_TABLE_OFFSETS, bit);
}

fn entry_of(chunk: ChunkId) -> u64 {
    CHUNK_TABLE_OFFSET + u64::from(chunk.0) * layout::CHUNK_ENTRY_BYTES
}

fn flip_word_and_seal(media: &Simulator, chunk: ChunkId, is_wear: bool, bit: usize) {
    let at = entry_of(chunk) + u64::from(is_wear) * 8;
    let low = media.load_word(at).unwrap() ^ 1 << bit;
    media.store_word(at, seal_for_test(chunk, is_wear, low)).unwrap();
}

/// Transaction that is committed but not redone. It moves the volume's last chunk to another place.
fn transaction() -> [(u64, u64); 2] {
    let moved = Owner::Volume { slot: Slot(0), index: 2 };
    [(LAST, Owner::Scrub), (OTHER, moved)]
        .map(|(chunk, owner)| (entry_of(chunk), encode_owner(chunk, owner)))
}

/// Last chunk of the volume, and a free chunk.
const LAST: ChunkId = ChunkId(4);
const OTHER: ChunkId = ChunkId(9);

fn write_transaction(media: &Simulator, words: &[(u64, u64)]) {
    let superblock = open_for(media, OpenMode::Peek).unwrap().superblock();
    redo_log::write_for_test(media, &superblock, words);
}

fn with_transaction() -> Simulator {
    let media = sample();
    write_transaction(&media, &transaction());
    media
}

/// Flips a bit in the second entry of the transaction, and updates the checksum.
fn flip_entry_and_seal(media: &Simulator, bit: usize) {
    let [first, (mut offset, mut word)] = transaction();
    match bit {
        0..64 => offset ^= 1 << bit,
        _ => word ^= 1 << (bit - 64),
    }
    let whole = sample();
    write_transaction(&whole, &[first, (offset, word)]);
    for at in (LOG_OFFSET..LOG_OFFSET + 4096).step_by(8) {
        media.store_word(at, whole.load_word(at).unwrap()).unwrap();
    }
}

const SUPERBLOCK_SEALED: Expected = &[
    ("magic", &["NotAPool"]),
    ("version", &["Version"]),
    ("superblock_bytes", &["SuperblockInvalid superblock_bytes"]),
    ("features_compatible", &["opens"]),
    // Bit 0 is known: volumes may be thin.
    ("features_read_only", &["Features", "opens"]),
    ("features_incompatible", &["Features"]),
    ("sequence", &["opens"]),
    ("uuid", &["opens"]),
    ("size_bytes", &["SuperblockInvalid chunk_table_entries", "SuperblockInvalid size_bytes"]),
    ("chunk_bytes", &["SuperblockInvalid chunk_bytes"]),
    ("strg_bytes", &["SuperblockInvalid strg_bytes", "opens"]),
    (
        "chunk_table_offset",
        &["Damaged OwnerWord", "SuperblockInvalid chunk_table_offset", "SuperblockInvalid offsets"],
    ),
    ("chunk_table_entries", &["SuperblockInvalid chunk_table_entries"]),
    (
        "volume_table_offsets",
        &[
            "Damaged MetadataTaken",
            "Damaged VolumeRecordLost",
            "SuperblockInvalid offsets",
            "SuperblockInvalid volume_table_offsets",
            "opens VolumeRecordCopy",
            "opens VolumeRecordCopy VolumeRecordStale",
        ],
    ),
    (
        "volume_slots",
        &[
            "Damaged SlotOutside",
            "Damaged VolumeRecordLost",
            "SuperblockInvalid offsets",
            "SuperblockInvalid volume_slots",
        ],
    ),
    ("volume_record_bytes", &["SuperblockInvalid volume_record_bytes"]),
    (
        "log_offset",
        &["Damaged LogDamaged", "SuperblockInvalid log_offset", "SuperblockInvalid offsets"],
    ),
    ("log_bytes", &["SuperblockInvalid log_bytes", "SuperblockInvalid offsets", "opens"]),
    ("created_unix_s", &["opens"]),
    ("growing_to_bytes", &["SuperblockInvalid growing_to_bytes", "opens GrowthUnfinished"]),
    ("reserved0", &["opens"]),
    ("mbr_id", &["opens"]),
    ("reserved1", &["opens"]),
    ("mbr_partitions", &["opens"]),
    ("mbr_signature", &["opens"]),
    ("reserved2", &["opens"]),
];

#[test]
fn flipped_bits_of_a_superblock_have_the_listed_outcomes() {
    let (media, fields) = (sample(), superblock_fields());
    for at in SUPERBLOCK_OFFSETS {
        let one = outcomes(&media, &fields, &|m, bit| flip_bit(m, at, bit));
        assert_all("one copy", &one, "opens SuperblockCopy");
    }
    let turn_both =
        |m: &Simulator, bit| SUPERBLOCK_OFFSETS.iter().for_each(|at| flip_bit(m, *at, bit));
    let mut both = outcomes(&media, &fields, &turn_both);
    let magic = both.remove("magic").unwrap();
    assert_eq!(magic, BTreeSet::from(["NotAPool".to_owned()]));
    assert_all("both copies", &both, "SuperblocksDamaged");
    let sealed = outcomes(&media, &without_checksum(fields), &flip_superblocks);
    assert_outcomes("with a checksum that fits", &sealed, SUPERBLOCK_SEALED);
}

const RECORD_SEALED: Expected = &[
    ("magic", &["Damaged VolumeRecordLost"]),
    ("sequence", &["opens"]),
    ("slot", &["Damaged VolumeRecordInvalid"]),
    ("state", &["Damaged VolumeRecordInvalid"]),
    ("format", &["Damaged VolumeRecordInvalid"]),
    ("name_bytes", &["Damaged VolumeRecordInvalid"]),
    ("reserved0", &["opens"]),
    // Two flags are valid without other changes: one allows missing chunks, and one marks an
    // unfinished split.
    (
        "flags",
        &["Damaged VolumeRecordInvalid", "opens SplitUnfinished", "opens ThinFeatureMissing"],
    ),
    ("uuid", &["opens"]),
    // Some changed sizes are valid too, as if the volume had not grown yet or had shrunk.
    ("size_bytes", &["Damaged IndexMissing", "Damaged VolumeRecordInvalid", "opens Leftover"]),
    ("created_unix_s", &["opens"]),
    ("name", &["Damaged VolumeNameTwice", "Damaged VolumeRecordInvalid", "opens"]),
    ("origin_slot", &["Damaged VolumeRecordInvalid"]),
    ("origin_index", &["Damaged VolumeRecordInvalid"]),
    // Only thin volumes may be guaranteed in part.
    ("unreserved_bytes", &["Damaged VolumeRecordInvalid"]),
    ("reserved1", &["opens"]),
];

#[test]
fn flipped_bits_of_a_volume_record_have_the_listed_outcomes() {
    let (media, fields) = (sample(), record_fields());
    for at in VOLUME_TABLE_OFFSETS {
        let one = outcomes(&media, &fields, &|m, bit| flip_bit(m, at, bit));
        assert_all("one copy", &one, "opens VolumeRecordCopy");
    }
    let turn_both =
        |m: &Simulator, bit| VOLUME_TABLE_OFFSETS.iter().for_each(|at| flip_bit(m, *at, bit));
    assert_all("both copies", &outcomes(&media, &fields, &turn_both), "Damaged VolumeRecordLost");
    let sealed = outcomes(&media, &without_checksum(fields), &flip_records);
    assert_outcomes("with a checksum that fits", &sealed, RECORD_SEALED);
}

const METADATA_OWNER_SEALED: Expected = &[
    ("index", &["Damaged OwnerWord"]),
    ("slot", &["Damaged OwnerWord"]),
    ("state", &["Damaged MetadataTaken", "Damaged OwnerWord"]),
];

const VOLUME_OWNER_SEALED: Expected = &[
    ("index", &["Damaged IndexMissing", "Damaged IndexTwice"]),
    ("slot", &["Damaged IndexMissing", "Damaged SlotOutside"]),
    ("state", &["Damaged IndexMissing", "Damaged OwnerWord"]),
];

const FREE_OWNER_SEALED: Expected = &[
    ("index", &["Damaged OwnerWord"]),
    ("slot", &["Damaged OwnerWord"]),
    ("state", &["Damaged IndexTwice", "Damaged OwnerWord", "opens Unscrubbed"]),
];

const VOLUME_WEAR_SEALED: Expected = &[("count", &["opens"]), ("owner", &["opens"])];

/// A flipped bit can turn the copied state into an invalid one.
const STATE_WEAR_SEALED: Expected =
    &[("count", &["opens"]), ("owner", &["opens", "opens WearWord"])];

#[test]
fn flipped_bits_of_the_chunk_table_have_the_listed_outcomes() {
    let media = sample();
    let chunks = [
        (ChunkId(0), METADATA_OWNER_SEALED, STATE_WEAR_SEALED),
        (ChunkId(2), VOLUME_OWNER_SEALED, VOLUME_WEAR_SEALED),
        (OTHER, FREE_OWNER_SEALED, STATE_WEAR_SEALED),
    ];
    for (chunk, sealed_owner, sealed_wear) in chunks {
        let at = entry_of(chunk);
        let case = |word: &str| format!("{word} of {chunk}");
        let owner = outcomes(&media, &owner_fields(), &|m, bit| flip_bit(m, at, bit));
        assert_all(&case("owner"), &owner, "Damaged OwnerWord");
        let flip = |m: &Simulator, bit| flip_word_and_seal(m, chunk, false, bit);
        let sealed = outcomes(&media, &without_checksum(owner_fields()), &flip);
        assert_outcomes(&case("owner with a check that fits"), &sealed, sealed_owner);
        let wear = outcomes(&media, &wear_fields(), &|m, bit| flip_bit(m, at + 8, bit));
        assert_all(&case("wear"), &wear, "opens WearWord");
        let flip = |m: &Simulator, bit| flip_word_and_seal(m, chunk, true, bit);
        let sealed = outcomes(&media, &without_checksum(wear_fields()), &flip);
        assert_outcomes(&case("wear with a check that fits"), &sealed, sealed_wear);
    }
}

const EMPTY_LOG: Expected = &[
    ("magic", &["Damaged LogDamaged"]),
    // If the log is empty, the fields of its last transaction are ignored.
    ("entries", &["opens"]),
    ("checksum", &["opens"]),
    ("commit", &["Damaged LogDamaged"]),
    ("reserved", &["opens"]),
];

const COMMITTED_LOG: Expected = &[
    ("magic", &["Damaged LogDamaged"]),
    ("entries", &["Damaged LogDamaged"]),
    ("checksum", &["Damaged LogDamaged"]),
    ("commit", &["Damaged LogDamaged"]),
    ("reserved", &["opens LogPending Unscrubbed"]),
];

const LOG_ENTRY_SEALED: Expected = &[
    (
        "offset",
        &[
            "Damaged LogDamaged",
            "Damaged OwnerWord",
            // The offset is inside a volume or is a wear word, so a chunk is missing after the
            // transaction.
            "Damaged IndexMissing",
        ],
    ),
    ("word", &["Damaged OwnerWord"]),
];

#[test]
fn flipped_bits_of_the_log_have_the_listed_outcomes() {
    let flip = |m: &Simulator, bit| flip_bit(m, LOG_OFFSET, bit);
    assert_outcomes("empty", &outcomes(&sample(), &log_fields(), &flip), EMPTY_LOG);
    let pending = with_transaction();
    assert_outcomes("committed", &outcomes(&pending, &log_fields(), &flip), COMMITTED_LOG);
    let flip = |m: &Simulator, bit| flip_bit(m, LOG_OFFSET + 64 + 16, bit);
    assert_all("an entry", &outcomes(&pending, &log_entry_fields(), &flip), "Damaged LogDamaged");
    let sealed = outcomes(&pending, &log_entry_fields(), &flip_entry_and_seal);
    assert_outcomes("an entry with a checksum that fits", &sealed, LOG_ENTRY_SEALED);
}

/// Flips the first and last bit of each field in a real file. If opening is refused, the file
/// should keep its bytes, length and blocks.
#[test]
fn refused_file_is_unchanged() {
    let fixture = Fixture::new();
    let whole = |image: &Simulator| {
        let mut bytes = vec![0; image.len_bytes() as usize];
        image.read(0, &mut bytes).unwrap();
        bytes
    };
    let mut refused = BTreeSet::new();
    let mut refuse = |media: &Simulator, fields: &[Field], flip: &dyn Fn(&Simulator, usize)| {
        for bit in fields.iter().flat_map(|(_, bits)| [bits.start, bits.end - 1]) {
            let image = copy_of(media);
            flip(&image, bit);
            let bytes = whole(&image);
            fs::write(fixture.path(), &bytes).unwrap();
            let before = (bytes, fixture.image());
            for mode in [OpenMode::Peek, OpenMode::ReadOnly] {
                let _ = Pool::open(&fixture.path(), mode).map(|pool| pool.check().unwrap());
            }
            let _ = Pool::repair(&fixture.path(), true);
            let same = || before == (fs::read(fixture.path()).unwrap(), fixture.image());
            assert!(same(), "the check changed the file: bit {bit}");
            if let Err(error) = Pool::open(&fixture.path(), OpenMode::ReadWrite) {
                assert!(same(), "{error}: the file has changed");
                refused.insert(name_of(&error));
            }
        }
    };
    let media = sample();
    refuse(&media, &superblock_fields(), &flip_superblocks);
    refuse(&media, &record_fields(), &flip_records);
    refuse(&media, &owner_fields(), &|m, bit| flip_bit(m, entry_of(ChunkId(2)), bit));
    refuse(&with_transaction(), &log_fields(), &|m, bit| flip_bit(m, LOG_OFFSET, bit));
    refuse(&with_transaction(), &log_entry_fields(), &flip_entry_and_seal);
    assert!(refused.len() >= 12, "only these were refused: {refused:?}");
}
