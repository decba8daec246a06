//! Fuzz targets for BTTs with arbitrary content in memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use pmem_volume::btt::{self, BttError, Engine};
use pmem_volume::media::{Durability, Media, MediaError};
use uuid::Uuid;

use super::cursor::Cursor;
use super::image::Image;

const MIB: u64 = 1 << 20;
const INFO_BYTES: u64 = 4096;
const MAX_EDITS: usize = 48;
/// Number of operations on an engine per input.
const OPERATIONS: u8 = 12;

/// Bytes of a volume in memory.
struct Space(Mutex<Image>);

impl Media for Space {
    fn len_bytes(&self) -> u64 {
        self.0.lock().unwrap().len_bytes
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        assert!(offset_bytes + into.len() as u64 <= self.len_bytes(), "a read outside the volume");
        self.0.lock().unwrap().read(offset_bytes, into);
        Ok(())
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        assert!(
            offset_bytes + bytes.len() as u64 <= self.len_bytes(),
            "a write outside the volume"
        );
        self.0.lock().unwrap().write(offset_bytes, bytes);
        Ok(())
    }

    fn persist(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        assert!(offset_bytes.is_multiple_of(8));
        let mut word = [0; 8];
        self.read(offset_bytes, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        assert!(offset_bytes.is_multiple_of(8));
        self.store(offset_bytes, &word.to_le_bytes())
    }
}

fn formatted(volume_bytes: u64, sector_bytes: u32) -> Space {
    let mut image = Image::default();
    image.set_len(volume_bytes);
    let space = Space(Mutex::new(image));
    btt::Layout::new(volume_bytes, sector_bytes, Uuid::from_u128(9))
        .unwrap()
        .format(&space)
        .unwrap();
    space
}

/// Valid BTT, and the content of some of its sectors.
struct Base {
    image: Image,
    content: BTreeMap<u64, Vec<u8>>,
}

/// Number of sectors with content. The sectors are swapped in pairs, so that each is in its
/// neighbor's block.
const WRITTEN: u64 = 64;
/// Number of sectors at each end of a volume that are compared.
const COMPARED_SECTORS: u64 = 80;

/// Returns the content of the readable sectors.
fn sectors_of(space: &Space) -> BTreeMap<u64, Vec<u8>> {
    let (reader, _) = btt::Reader::open_damaged(space);
    let (sectors, sector_bytes) = (reader.sectors(), reader.sector_bytes() as usize);
    let mut read = BTreeMap::new();
    for range in
        [0..COMPARED_SECTORS.min(sectors), sectors.saturating_sub(COMPARED_SECTORS)..sectors]
    {
        let mut bytes = vec![0; (range.end - range.start) as usize * sector_bytes];
        let mut lost = vec![];
        reader.read_many(range.start, &mut bytes, &mut |sector, _| lost.push(sector));
        let pieces = range.zip(bytes.chunks(sector_bytes.max(1)).map(<[u8]>::to_vec));
        read.extend(pieces.filter(|(sector, _)| !lost.contains(sector)));
    }
    read
}

/// Writes sectors of the first arena. It stores their blocks, and a map that swaps them in pairs.
fn write_some(space: &Space, sector_bytes: u64) {
    const WRITTEN_ENTRY: u32 = 3 << 30;
    let info: [u8; INFO_BYTES as usize] = space.0.lock().unwrap().bytes(INFO_BYTES);
    let offset = |at: usize| u64::from_le_bytes(info[at..at + 8].try_into().unwrap());
    let (data_at, map_at) = (INFO_BYTES + offset(88), INFO_BYTES + offset(96));
    for sector in 0..WRITTEN {
        let block = sector ^ 1;
        space
            .store(data_at + block * sector_bytes, &vec![sector as u8 + 1; sector_bytes as usize])
            .unwrap();
        let entry = (block as u32 | WRITTEN_ENTRY).to_le_bytes();
        space.store(map_at + sector * 4, &entry).unwrap();
    }
    assert!(btt::check(space).is_clean());
}

/// Returns three BTTs: an arena with 4096-byte sectors, one with 512-byte sectors, and one with two
/// arenas.
fn bases() -> &'static [Base] {
    static BASES: OnceLock<Vec<Base>> = OnceLock::new();
    BASES.get_or_init(|| {
        let two = formatted(18 * MIB, 4096);
        let extension = btt::extend(&two, 36 * MIB).unwrap();
        two.0.lock().unwrap().set_len(36 * MIB);
        extension.format(&two).unwrap();
        extension
            .link_words()
            .into_iter()
            .for_each(|(at, word)| two.0.lock().unwrap().write_word(at, word));
        assert!(btt::check(&two).is_clean());
        let all = [(formatted(18 * MIB, 4096), 4096), (formatted(18 * MIB, 512), 512), (two, 4096)];
        let base = |(space, sector_bytes): (Space, u64)| {
            write_some(&space, sector_bytes);
            let content = sectors_of(&space);
            Base { image: space.0.into_inner().unwrap(), content }
        };
        all.map(base).into()
    })
}

/// Updates an info block's Fletcher checksum (UEFI 2.10, 6.2). It covers 32-bit words, with the
/// checksum field set to zero.
pub(super) fn seal_info(image: &mut Image, at: u64) {
    let bytes: [u8; INFO_BYTES as usize - 8] = image.bytes(at);
    let (mut low, mut high) = (0u32, 0u32);
    let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    for word in words.chain([0, 0]) {
        low = low.wrapping_add(word);
        high = high.wrapping_add(low);
    }
    image.write_word(at + INFO_BYTES - 8, u64::from(high) << 32 | u64::from(low));
}

fn edit(image: &mut Image, from: &mut Cursor<'_>) {
    let len_bytes = image.len_bytes;
    let arena_end = 18 * MIB;
    // Start of the last regions of the arena: the map, the flog and the second info block.
    let tail = arena_end - INFO_BYTES - 16384 - 32768;
    match from.number(1) % 6 {
        0 => image.write_word(from.below(len_bytes / 8) * 8, from.value()),
        1 | 2 => {
            let infos = [INFO_BYTES, arena_end - INFO_BYTES, arena_end, len_bytes - INFO_BYTES];
            let how = from.number(1);
            let at = infos[how as usize % 4];
            let word = [from.below(16) * 8, from.below(511) * 8][usize::from(how & 16 != 0)];
            image.write_word(at + word, from.value());
            if how & 32 == 0 {
                seal_info(image, at);
            }
            // In most cases, the other copy is changed too.
            if how & 64 == 0 {
                let block: [u8; INFO_BYTES as usize] = image.bytes(at);
                image.write(infos[(how as usize % 4) ^ 1], &block);
            }
        }
        3 => {
            let entry = tail + 32768 + from.below(1024) * 16;
            let fields = [from.value(), from.value(), from.below(8)];
            let bytes = [
                fields[0] as u32,
                fields[1] as u32,
                fields[1] as u32 ^ fields[2] as u32,
                fields[2] as u32,
            ];
            image.write(entry, &bytes.map(u32::to_le_bytes).concat());
        }
        4 => image.write(tail + from.below(12288) * 4, &(from.value() as u32).to_le_bytes()),
        _ => {
            let (at, count) = (tail + from.below(49152), from.number(1) as usize);
            let bytes = from.take(count);
            image.write(at, bytes);
        }
    }
}

/// Opens arbitrary bytes as a BTT, also after a repair. Operations should succeed or be refused.
/// Correct sectors that are not written should remain correct. If the BTT passes a check, it should
/// execute all operations, keep the written data, and pass a check afterwards.
pub(crate) fn btt_engine(data: &[u8]) {
    let mut from = Cursor::new(data);
    let bases = bases();
    let base = &bases[from.below(bases.len() as u64) as usize];
    let mut image = base.image.clone();
    for _ in 0..from.below(8) {
        edit(&mut image, &mut from);
    }
    let space = Space(Mutex::new(image));
    if from.number(1) % 2 == 1 {
        let repair = btt::plan_repair(&space, btt::GiveUp::Nothing, &mut |_| {}).unwrap();
        repair.apply(&space).unwrap();
    }
    let before = sectors_of(&space);
    let mut touched = Vec::new();
    let is_clean = btt::check(&space).is_clean();
    let engine = match Engine::open(&space) {
        Ok(engine) => engine,
        Err(error) => {
            assert!(
                !is_clean || matches!(error, BttError::SectorSize { .. }),
                "clean, but {error}"
            );
            return;
        }
    };
    let sector_bytes = engine.sector_bytes() as usize;
    let mut written = BTreeMap::new();
    for version in 1..=OPERATIONS {
        // Sectors around the ends of the volume, and far past it.
        let first = from.below(engine.sectors() + 4);
        let count = 1 + from.below(100);
        let sectors = first..first.saturating_add(count);
        let is_inside = sectors.end <= engine.sectors();
        let mut bytes = vec![version; count as usize * sector_bytes];
        let operation = from.number(1) % 4;
        let result = match operation {
            0 => engine.read(first, &mut bytes),
            1 => engine.discard(sectors.clone()),
            _ => engine.write(first, &bytes),
        };
        // Sectors that were not written may be in error.
        let is_refused = matches!(result, Err(BttError::Sector { .. })) && operation == 0;
        assert!(!is_clean || result.is_ok() == is_inside || is_refused, "clean, but {result:?}");
        if operation > 0 {
            touched.push(sectors.clone());
        }
        if is_inside && operation > 0 {
            let byte = if operation == 1 { 0 } else { version };
            written.extend(sectors.map(|sector| (sector, byte)));
        }
    }
    engine.flush().unwrap();
    drop(engine);
    let after = sectors_of(&space);
    let right = before.iter().filter(|(sector, bytes)| base.content.get(sector) == Some(bytes));
    for (sector, bytes) in
        right.filter(|(sector, _)| !touched.iter().any(|range| range.contains(sector)))
    {
        assert!(
            after.get(sector) == Some(bytes),
            "sector {sector} was readable and has not been written"
        );
    }
    if is_clean {
        assert!(btt::check(&space).is_clean(), "use has damaged a clean volume");
        let engine = Engine::open(&space).unwrap();
        let mut bytes = vec![0; sector_bytes];
        for (sector, byte) in written {
            engine.read(sector, &mut bytes).unwrap();
            assert!(bytes.iter().all(|b| *b == byte), "sector {sector} lacks its last write");
        }
    }
}

/// Treats arbitrary bytes as a BTT: checks, reads and extends it. All operations should return,
/// stay inside the media, and agree with each other.
pub(crate) fn btt_check(data: &[u8]) {
    let mut from = Cursor::new(data);
    let bases = bases();
    let base = &bases[from.below(bases.len() as u64) as usize];
    let mut image = base.image.clone();
    for _ in 0..MAX_EDITS {
        if from.is_empty() {
            break;
        }
        edit(&mut image, &mut from);
    }
    let space = Space(Mutex::new(image));
    let report = btt::check(&space);
    let reader = btt::Reader::open(&space);
    if report.is_clean() {
        let reader =
            reader.as_ref().unwrap_or_else(|finding| panic!("clean, but unreadable: {finding}"));
        assert_eq!(reader.sectors(), report.sectors());
    }
    if let Ok(reader) = &reader {
        let mut sector = vec![0; reader.sector_bytes() as usize];
        let last = reader.sectors() - 1;
        for number in [0, 1, last / 2, last] {
            reader.read(number.min(last), &mut sector).unwrap();
        }
    }
    drop(reader);
    let right = sectors_of(&space);
    let repair = btt::plan_repair(&space, btt::GiveUp::Nothing, &mut |_| {}).unwrap();
    repair.apply(&space).unwrap();
    let found = btt::check(&space);
    assert_eq!(
        format!("{found:?}"),
        format!("{:?}", repair.report_after),
        "the repair differs from its plan"
    );
    let again = btt::plan_repair(&space, btt::GiveUp::Nothing, &mut |_| {}).unwrap();
    assert!(again.fixes.is_empty(), "the repair left damage: {again:?}");
    let now = sectors_of(&space);
    for (sector, bytes) in
        right.iter().filter(|(sector, bytes)| base.content.get(sector) == Some(bytes))
    {
        assert!(
            now.get(sector) == Some(bytes),
            "sector {sector} was right before the repair: {repair:?}"
        );
    }
    let giving_up = btt::plan_repair(&space, btt::GiveUp::Sectors, &mut |_| {}).unwrap();
    let copy = Space(Mutex::new(space.0.lock().unwrap().clone()));
    giving_up.apply(&copy).unwrap();
    let found = btt::check(&copy);
    assert_eq!(
        format!("{found:?}"),
        format!("{:?}", giving_up.report_after),
        "no refusal if sectors are discarded"
    );
    if let Ok(extension) = btt::extend(&space, space.len_bytes() + 18 * MIB) {
        let mut image = space.0.into_inner().unwrap();
        image.set_len(image.len_bytes + 18 * MIB);
        let grown = Space(Mutex::new(image));
        extension.format(&grown).unwrap();
        extension
            .link_words()
            .into_iter()
            .for_each(|(at, word)| grown.0.lock().unwrap().write_word(at, word));
        assert!(btt::check(&grown).arenas.len() > report.arenas.len(), "the growth is not visible");
    }
}
