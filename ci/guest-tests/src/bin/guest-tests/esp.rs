//! Builds a disk with an EFI system partition that firmware can read: GPT (UEFI 2.10, 5.3), FAT16
//! with long names (Microsoft's FAT specification), and files.

const SECTOR_BYTES: usize = 512;
const CLUSTER_SECTORS: usize = 8;
const CLUSTER_BYTES: usize = CLUSTER_SECTORS * SECTOR_BYTES;
const PARTITION_SECTOR: usize = 2048;
const ROOT_ENTRIES: usize = 512;
const ENTRY_BYTES: usize = 32;
const PARTITION_ENTRY_BYTES: usize = 128;
const PARTITION_ENTRIES: usize = 128;
/// C12A7328-F81F-11D2-BA4B-00A0C93EC93B.
const EFI_SYSTEM_PARTITION: [u8; 16] = [
    0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
];
const DIRECTORY: u8 = 0x10;
const LONG_NAME: u8 = 0x0f;
/// Minimum number of clusters. A file system with fewer clusters is FAT12 instead of FAT16.
const MIN_CLUSTERS: usize = 4200;

#[derive(Default)]
struct Folder<'a> {
    files: Vec<(&'a str, &'a [u8])>,
    folders: Vec<(&'a str, Folder<'a>)>,
}

impl<'a> Folder<'a> {
    fn add(&mut self, path: &'a str, content: &'a [u8]) {
        match path.split_once('/') {
            None => self.files.push((path, content)),
            Some((name, rest)) => {
                let at = match self.folders.iter().position(|(other, _)| *other == name) {
                    Some(at) => at,
                    None => {
                        self.folders.push((name, Folder::default()));
                        self.folders.len() - 1
                    }
                };
                self.folders[at].1.add(rest, content);
            }
        }
    }
}

/// Clusters of a FAT16 volume and their chains.
struct Volume {
    /// Entries of the file allocation table. The first two do not represent clusters.
    table: Vec<u16>,
    data: Vec<u8>,
    /// Number of short names so far. Short names are just numbers, because readers use the long
    /// names.
    names: u32,
}

impl Volume {
    /// Stores a file or a folder. Returns its first cluster, or 0 if it is empty.
    fn store(&mut self, content: &[u8]) -> u16 {
        let clusters = content.len().div_ceil(CLUSTER_BYTES);
        let first = self.table.len();
        for nth in 1..=clusters {
            self.table.push(if nth == clusters { 0xffff } else { (first + nth) as u16 });
        }
        self.data.extend(content);
        self.data.resize((self.table.len() - 2) * CLUSTER_BYTES, 0);
        if clusters == 0 { 0 } else { first as u16 }
    }

    fn entries(&mut self, folder: &Folder<'_>) -> Vec<u8> {
        let mut entries = Vec::new();
        for (name, content) in &folder.files {
            let first = self.store(content);
            self.entry(&mut entries, name, 0, first, content.len());
        }
        for (name, below) in &folder.folders {
            let content = self.entries(below);
            let first = self.store(&content);
            self.entry(&mut entries, name, DIRECTORY, first, 0);
        }
        entries
    }

    fn entry(&mut self, entries: &mut Vec<u8>, name: &str, attributes: u8, first: u16, len: usize) {
        self.names += 1;
        let short = format!("F{:07}   ", self.names).into_bytes();
        let sum = short.iter().fold(0u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
        let mut units: Vec<u16> = name.encode_utf16().chain([0]).collect();
        assert!(units.len() <= 14, "{name}: one entry has room for 13 characters");
        units.truncate(13);
        units.resize(13, 0xffff);
        let bytes =
            |units: &[u16]| units.iter().flat_map(|unit| unit.to_le_bytes()).collect::<Vec<_>>();
        entries.push(0x41);
        entries.extend(bytes(&units[..5]));
        entries.extend([LONG_NAME, 0, sum]);
        entries.extend(bytes(&units[5..11]));
        entries.extend([0; 2]);
        entries.extend(bytes(&units[11..]));
        entries.extend(short);
        entries.push(attributes);
        entries.extend([0; 14]);
        entries.extend(first.to_le_bytes());
        entries.extend((len as u32).to_le_bytes());
    }
}

/// Returns a disk with one partition that contains `files`, each with its path.
pub(crate) fn disk(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut root = Folder::default();
    files.iter().for_each(|(path, content)| root.add(path, content));
    let mut volume = Volume { table: vec![0xfff8, 0xffff], data: Vec::new(), names: 0 };
    let mut entries = volume.entries(&root);
    assert!(entries.len() <= ROOT_ENTRIES * ENTRY_BYTES);
    entries.resize(ROOT_ENTRIES * ENTRY_BYTES, 0);
    let clusters = (volume.table.len() - 2).max(MIN_CLUSTERS);
    volume.data.resize(clusters * CLUSTER_BYTES, 0);
    let table_sectors = ((clusters + 2) * 2).div_ceil(SECTOR_BYTES);
    let mut table: Vec<u8> = volume.table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    table.resize(table_sectors * SECTOR_BYTES, 0);

    let sectors = 1 + table_sectors + (entries.len() + volume.data.len()) / SECTOR_BYTES;
    let mut partition = boot_sector(table_sectors, sectors);
    partition.extend(table);
    partition.extend(entries);
    partition.extend(volume.data);
    let mut image = partition_table(sectors);
    image.resize(PARTITION_SECTOR * SECTOR_BYTES, 0);
    image.extend(partition);
    // Space for the second partition table, which this disk lacks.
    image.resize(image.len() + 34 * SECTOR_BYTES, 0);
    image
}

fn boot_sector(table_sectors: usize, sectors: usize) -> Vec<u8> {
    let mut sector = vec![0xeb, 0x3c, 0x90];
    sector.extend(b"MSWIN4.1");
    sector.extend((SECTOR_BYTES as u16).to_le_bytes());
    // The volume has one reserved sector and one table.
    sector.extend([CLUSTER_SECTORS as u8, 1, 0, 1]);
    sector.extend((ROOT_ENTRIES as u16).to_le_bytes());
    sector.extend([0, 0, 0xf8]);
    sector.extend((table_sectors as u16).to_le_bytes());
    sector.extend([0; 8]);
    sector.extend((sectors as u32).to_le_bytes());
    sector.extend([0x80, 0, 0x29, 1, 2, 3, 4]);
    sector.extend(b"ESP        FAT16   ");
    sector.resize(SECTOR_BYTES - 2, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

fn partition_table(sectors: usize) -> Vec<u8> {
    let (first, last) = (PARTITION_SECTOR as u64, (PARTITION_SECTOR + sectors - 1) as u64);
    let mut entries = EFI_SYSTEM_PARTITION.to_vec();
    entries.extend([0x11; 16]);
    entries.extend(first.to_le_bytes());
    entries.extend(last.to_le_bytes());
    entries.resize(PARTITION_ENTRIES * PARTITION_ENTRY_BYTES, 0);
    let header = |own_sum: u32| {
        let mut header = b"EFI PART".to_vec();
        let words = |header: &mut Vec<u8>, words: &[u32]| {
            words.iter().for_each(|word| header.extend(word.to_le_bytes()));
        };
        words(&mut header, &[0x1_0000, 92, own_sum, 0]);
        for sector in [1, last + 34, 34, last] {
            header.extend(sector.to_le_bytes());
        }
        header.extend([0x22; 16]);
        header.extend(2u64.to_le_bytes());
        words(
            &mut header,
            &[PARTITION_ENTRIES as u32, PARTITION_ENTRY_BYTES as u32, crc32(&entries)],
        );
        header
    };
    let mut image = vec![0; SECTOR_BYTES];
    // Protective partition.
    image[0x1c2] = 0xee;
    image[0x1c6] = 1;
    image[0x1ca..0x1ce].fill(0xff);
    image[0x1fe..].copy_from_slice(&[0x55, 0xaa]);
    image.extend(header(crc32(&header(0))));
    image.resize(2 * SECTOR_BYTES, 0);
    image.extend(entries);
    image
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 }
        })
    };
    !bytes.iter().fold(u32::MAX, step)
}
