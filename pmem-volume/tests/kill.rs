//! A process that does random things to a real pool is killed, again and again. Afterwards the pool is what the
//! process said it was, give or take the operation it was in.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pmem_volume::{CHUNK_BYTES, Extent, OpenMode, Pool, Shrink, VolumeFormat, VolumeSize};

const POOL_VARIABLE: &str = "PMEM_VOLUME_KILL_TEST_POOL";
const SEED_VARIABLE: &str = "PMEM_VOLUME_KILL_TEST_SEED";
const POOL_BYTES: u64 = 96 << 20;
/// It grows a chunk at a time, up to this.
const MAX_POOL_BYTES: u64 = 256 << 20;
const ROUNDS: u64 = 200;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").unwrap();
    out.flush().unwrap();
}

/// Not a test of its own: the process to be killed. It never ends by itself.
#[test]
fn the_process_that_is_killed() {
    let Some(path) = std::env::var_os(POOL_VARIABLE).map(PathBuf::from) else { return };
    let mut random = Random(std::env::var(SEED_VARIABLE).unwrap().parse().unwrap());
    let mut pool = Pool::open(&path, OpenMode::ReadWrite).unwrap();
    let mut lent: Vec<Extent> = Vec::new();
    loop {
        match random.below(11) {
            6 => {
                // What is lent is given up, as by a process that ends.
                let bytes = pool.info().total_bytes + CHUNK_BYTES;
                drop(pool);
                lent.clear();
                pool = match bytes <= MAX_POOL_BYTES {
                    true => Pool::grow(&path, bytes).unwrap(),
                    false => Pool::open(&path, OpenMode::ReadWrite).unwrap(),
                };
                say("grown");
            }
            7 => {
                if let Some(name) = pick(&pool, &mut random) {
                    let size = VolumeSize::Bytes((random.below(4) + 1) * CHUNK_BYTES);
                    // Full, or its size already: ordinary.
                    let _ = pool.resize_volume(&name, size, Shrink::Allow);
                    say("resized");
                }
            }
            8 => {
                let new_name = format!("v{}", random.below(6));
                if let Some(name) = pick(&pool, &mut random)
                    && pool.volumes().iter().all(|v| v.name != new_name)
                {
                    say(&format!("rename {name},{new_name}"));
                    pool.rename_volume(&name, &new_name).unwrap();
                    say(&format!("renamed {name},{new_name}"));
                }
            }
            0..=2 => {
                if let Ok(extents) = pool.alloc_memory((random.below(8) + 1) * CHUNK_BYTES) {
                    for extent in &extents {
                        pool.file().write_all_at(&[0x5a; 4096], extent.offset_bytes()).unwrap();
                        let end = extent.offset_bytes() + extent.len_bytes();
                        pool.file().write_all_at(&[0x5a; 4096], end - 4096).unwrap();
                    }
                    lent.extend(extents);
                }
                say("lent");
            }
            3 => {
                let keep = random.below(lent.len() as u64 + 1) as usize;
                let back = lent.split_off(keep);
                pool.free_memory(&back).unwrap();
                say("freed");
            }
            4 => {
                let name = format!("v{}", random.below(6));
                if pool.volumes().iter().all(|v| v.name != name) {
                    say(&format!("make {name}"));
                    let made =
                        pool.create_volume(&name, VolumeSize::Bytes(2 * CHUNK_BYTES), VolumeFormat::Raw);
                    say(&format!("{} {name}", if made.is_ok() { "made" } else { "full" }));
                }
            }
            9 | 10 => {
                pool.scrub_some((random.below(8) + 1) * CHUNK_BYTES).unwrap();
                say("scrubbed");
            }
            _ => {
                if let Some(name) = pick(&pool, &mut random) {
                    say(&format!("delete {name}"));
                    pool.delete_volume(&name).unwrap();
                    say(&format!("deleted {name}"));
                }
            }
        }
    }
}

fn pick(pool: &Pool, random: &mut Random) -> Option<String> {
    let names: Vec<_> = pool.volumes().into_iter().map(|v| v.name).collect();
    (!names.is_empty()).then(|| names[random.below(names.len() as u64) as usize].clone())
}

fn start(path: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_process_that_is_killed", "--nocapture"])
        .env(POOL_VARIABLE, path)
        .env(SEED_VARIABLE, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What the process said, up to its death.
#[derive(Default)]
struct Said {
    volumes: BTreeSet<String>,
    /// The volume that it was making or deleting, or both names of one that it was renaming.
    in_flight: Vec<String>,
    other_operations: u32,
}

impl Said {
    fn hear(&mut self, line: &str) {
        let Some((_, line)) = line.split_once('@') else { return };
        match line.split_once(' ') {
            Some(("make" | "delete", name)) => self.in_flight = vec![name.to_owned()],
            Some(("rename", names)) => self.in_flight = names.split(',').map(str::to_owned).collect(),
            Some(("renamed", names)) => {
                let (old, new) = names.split_once(',').expect("two names");
                self.volumes.remove(old);
                self.volumes.insert(new.to_owned());
                self.in_flight.clear();
            }
            Some(("made", name)) => {
                self.volumes.insert(name.to_owned());
                self.in_flight.clear();
            }
            Some(("deleted", name)) => {
                self.volumes.remove(name);
                self.in_flight.clear();
            }
            Some(("full", _)) => self.in_flight.clear(),
            // What changes no names: loans, returns, sizes.
            _ => self.other_operations += 1,
        }
    }
}

/// Chunks of a file on tmpfs that have blocks.
fn chunks_with_data(file: &File) -> BTreeSet<u64> {
    let mut chunks = BTreeSet::new();
    let mut at = 0;
    loop {
        // SAFETY: takes numbers only.
        let data = unsafe { libc::lseek(file.as_raw_fd(), at, libc::SEEK_DATA) };
        if data < 0 {
            return chunks;
        }
        // SAFETY: takes numbers only.
        let hole = unsafe { libc::lseek(file.as_raw_fd(), data, libc::SEEK_HOLE) };
        chunks.extend(data as u64 / CHUNK_BYTES..(hole as u64).div_ceil(CHUNK_BYTES));
        at = hole;
    }
}

#[test]
fn a_killed_process_leaves_no_memory_behind_and_no_volume_between() {
    let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = folder.path().join("pool");
    drop(Pool::create(&path, POOL_BYTES, 0).unwrap());
    let mut said = Said::default();
    let mut random = Random(77);
    for round in 1..=ROUNDS {
        let mut child = start(&path, round * 7919);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut enough = 5 + random.below(60);
        while enough > 0 {
            let line = lines.next().expect("the process goes on until it is killed").unwrap();
            said.hear(&line);
            enough -= u64::from(line.contains('@'));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        lines.for_each(|line| said.hear(&line.unwrap()));

        let report = Pool::open(&path, OpenMode::ReadOnly).unwrap().check().unwrap();
        assert!(report.is_clean(), "round {round}: {report:?}");
        let pool = Pool::open(&path, OpenMode::ReadWrite).unwrap();
        let found: BTreeSet<_> = pool.volumes().into_iter().map(|v| v.name).collect();
        let differing: Vec<_> = found.symmetric_difference(&said.volumes).collect();
        let allowed: Vec<_> = said.in_flight.iter().collect::<BTreeSet<_>>().into_iter().collect();
        assert!(
            differing.is_empty() || differing == allowed,
            "round {round}: {differing:?}, in flight {allowed:?}"
        );
        let owned: BTreeSet<u64> = found
            .iter()
            .flat_map(|name| pool.open_volume(name).unwrap().extents().to_vec())
            .flat_map(|extent| extent.run.ids().map(|chunk| u64::from(chunk.0)))
            .collect();
        pool.scrub_all().unwrap();
        let info = pool.info();
        assert_eq!(info.memory_bytes + info.scrubbing_bytes, 0, "round {round}");
        assert_eq!(
            info.free_bytes,
            info.total_bytes - (2 + owned.len() as u64) * CHUNK_BYTES,
            "round {round}"
        );
        let stray: Vec<_> =
            chunks_with_data(pool.file()).into_iter().filter(|c| *c >= 2 && !owned.contains(c)).collect();
        assert!(stray.is_empty(), "round {round}: free chunks {stray:?} still have content");
        said.volumes = found;
        said.in_flight.clear();
    }
    assert!(
        said.other_operations > 100,
        "memory was lent, and sizes changed, only {} times",
        said.other_operations
    );
}
