//! BTTs that say anything, in memory.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use pmem_volume::btt::{self, ReadAt, WriteAt};
use pmem_volume::media::MediaError;
use uuid::Uuid;

use super::cursor::Cursor;
use super::image::Image;

const MIB: u64 = 1 << 20;
const INFO_BYTES: u64 = 4096;
const MAX_EDITS: usize = 48;

/// A volume's bytes.
struct Space(RefCell<Image>);

impl ReadAt for Space {
    fn len_bytes(&self) -> u64 {
        self.0.borrow().len_bytes
    }

    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        assert!(offset_bytes + into.len() as u64 <= self.len_bytes(), "a read outside the volume");
        self.0.borrow().read(offset_bytes, into);
        Ok(())
    }
}

impl WriteAt for Space {
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        assert!(offset_bytes + bytes.len() as u64 <= self.len_bytes(), "a write outside the volume");
        self.0.borrow_mut().write(offset_bytes, bytes);
        Ok(())
    }

    fn persist(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Ok(())
    }
}

fn formatted(volume_bytes: u64, sector_bytes: u32) -> Space {
    let mut image = Image::default();
    image.set_len(volume_bytes);
    let space = Space(RefCell::new(image));
    btt::Layout::new(volume_bytes, sector_bytes, Uuid::from_u128(9)).unwrap().format(&space).unwrap();
    space
}

/// A BTT that is whole, and what some of its sectors hold.
struct Base {
    image: Image,
    content: BTreeMap<u64, Vec<u8>>,
}

/// Sectors with content: every second of them lies in the block of its neighbour.
const WRITTEN: u64 = 64;
/// Sectors that are looked at from both ends of a volume.
const LOOKED_AT: u64 = 80;

/// What sectors read as, of those that can be read.
fn sectors_of(space: &Space) -> BTreeMap<u64, Vec<u8>> {
    let (reader, _) = btt::Reader::open_damaged(space).unwrap();
    let (sectors, sector_bytes) = (reader.sectors(), reader.sector_bytes() as usize);
    let mut read = BTreeMap::new();
    for range in [0..LOOKED_AT.min(sectors), sectors.saturating_sub(LOOKED_AT)..sectors] {
        let mut bytes = vec![0; (range.end - range.start) as usize * sector_bytes];
        let mut lost = vec![];
        reader.read_many(range.start, &mut bytes, &mut |sector, _| lost.push(sector));
        let pieces = range.zip(bytes.chunks(sector_bytes.max(1)).map(<[u8]>::to_vec));
        read.extend(pieces.filter(|(sector, _)| !lost.contains(sector)));
    }
    read
}

/// Writes sectors of the first arena: their blocks, and the map that swaps them in pairs.
fn write_some(space: &Space, sector_bytes: u64) {
    const WRITTEN_ENTRY: u32 = 3 << 30;
    let info: [u8; INFO_BYTES as usize] = space.0.borrow().bytes(INFO_BYTES);
    let offset = |at: usize| u64::from_le_bytes(info[at..at + 8].try_into().unwrap());
    let (data_at, map_at) = (INFO_BYTES + offset(88), INFO_BYTES + offset(96));
    for sector in 0..WRITTEN {
        let block = sector ^ 1;
        space
            .write_at(data_at + block * sector_bytes, &vec![sector as u8 + 1; sector_bytes as usize])
            .unwrap();
        let entry = (block as u32 | WRITTEN_ENTRY).to_le_bytes();
        space.write_at(map_at + sector * 4, &entry).unwrap();
    }
    assert!(btt::check(space).unwrap().is_clean());
}

/// An arena of 4096-byte sectors, one of 512-byte sectors, and two arenas.
fn bases() -> &'static [Base] {
    static BASES: OnceLock<Vec<Base>> = OnceLock::new();
    BASES.get_or_init(|| {
        let two = formatted(18 * MIB, 4096);
        let extension = btt::extend(&two, 36 * MIB).unwrap().unwrap();
        two.0.borrow_mut().set_len(36 * MIB);
        extension.format(&two).unwrap();
        extension.link().into_iter().for_each(|(at, word)| two.0.borrow_mut().write_word(at, word));
        assert!(btt::check(&two).unwrap().is_clean());
        let all = [(formatted(18 * MIB, 4096), 4096), (formatted(18 * MIB, 512), 512), (two, 4096)];
        let base = |(space, sector_bytes): (Space, u64)| {
            write_some(&space, sector_bytes);
            let content = sectors_of(&space);
            Base { image: space.0.into_inner(), content }
        };
        all.map(base).into()
    })
}

/// Fletcher's checksum (UEFI 2.10, 6.2): 32-bit words, and the field itself counts as zeros.
pub fn seal_info(image: &mut Image, at: u64) {
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
    // Flog and second info block, and the map before them.
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
            // Its copy as well.
            if how & 64 == 0 {
                let block: [u8; INFO_BYTES as usize] = image.bytes(at);
                image.write(infos[(how as usize % 4) ^ 1], &block);
            }
        }
        3 => {
            let entry = tail + 32768 + from.below(1024) * 16;
            let fields = [from.value(), from.value(), from.below(8)];
            let bytes =
                [fields[0] as u32, fields[1] as u32, fields[1] as u32 ^ fields[2] as u32, fields[2] as u32];
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

/// Any bytes as a BTT: checks, readers and growth end in an answer, read and write nothing outside of it, and agree.
pub fn btt_check(data: &[u8]) {
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
    let space = Space(RefCell::new(image));
    let report = btt::check(&space).unwrap();
    let reader = btt::Reader::open(&space).unwrap();
    if report.is_clean() {
        let reader = reader.as_ref().unwrap_or_else(|finding| panic!("clean, and no reader: {finding}"));
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
    repair.carry_out(&space).unwrap();
    let found = btt::check(&space).unwrap();
    assert_eq!(format!("{found:?}"), format!("{:?}", repair.after), "a repair does not do what it said");
    let again = btt::plan_repair(&space, btt::GiveUp::Nothing, &mut |_| {}).unwrap();
    assert!(again.mendings.is_empty(), "what was repaired is still damaged: {again:?}");
    let now = sectors_of(&space);
    for (sector, bytes) in right.iter().filter(|(sector, bytes)| base.content.get(sector) == Some(bytes)) {
        assert!(now.get(sector) == Some(bytes), "sector {sector} was right before the repair: {repair:?}");
    }
    let giving_up = btt::plan_repair(&space, btt::GiveUp::Sectors, &mut |_| {}).unwrap();
    let copy = Space(RefCell::new(space.0.borrow().clone()));
    giving_up.carry_out(&copy).unwrap();
    let found = btt::check(&copy).unwrap();
    assert_eq!(format!("{found:?}"), format!("{:?}", giving_up.after), "nor if it gives sectors up");
    if let Ok(extension) = btt::extend(&space, space.len_bytes() + 18 * MIB).unwrap() {
        let mut image = space.0.into_inner();
        image.set_len(image.len_bytes + 18 * MIB);
        let grown = Space(RefCell::new(image));
        extension.format(&grown).unwrap();
        extension.link().into_iter().for_each(|(at, word)| grown.0.borrow_mut().write_word(at, word));
        assert!(btt::check(&grown).unwrap().arenas.len() > report.arenas.len(), "growth is not seen");
    }
}
