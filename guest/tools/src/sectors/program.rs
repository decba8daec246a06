//! Programs of operations on sectors. A seed determines them. They run in several threads, and each
//! thread has its own sectors.

use std::ops::Range;
use std::str::FromStr;
use std::thread;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};

use super::{Content, Shape};
use crate::aligned::Aligned;
use crate::content::Bytes;

/// Number of sectors in a stripe. Stripes are assigned to threads in turn. A stripe is a multiple
/// of a page, so that two threads never share a page in the page cache.
const STRIPE_SECTORS: u64 = 64;
/// Maximum number of sectors in a page. A program's range also begins at a page boundary.
const PAGE_SECTORS: u64 = 8;
/// Longest operation in sectors. Lengths are distributed logarithmically: each operation has a
/// random length up to a random power of two.
const MAX_SECTORS: u64 = 32;
/// Number of operations after which a thread flushes.
const FLUSH_INTERVAL: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mix {
    /// Only writes, because Linux' BTT driver supports neither discards nor zeroing.
    Writes,
    /// Only writes that bypass the cache.
    Direct,
    /// A quarter of the operations are discards or zeroing.
    Discards,
}

/// Program of operations. Its text is `writes:SEED:OPERATIONS:THREADS`. The first word is `direct`
/// or `discards` for another mix. `:FIRST-END` at the end limits the program to a range of sectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    mix: Mix,
    seed: u64,
    operations: u64,
    threads: u32,
    /// Range of sectors. `None` means all sectors.
    sectors: Option<Range<u64>>,
}

impl FromStr for Program {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            anyhow!(
                "{text:?} is not writes:SEED:OPERATIONS:THREADS[:FIRST-END], direct:... or discards:..."
            )
        };
        let parts: Vec<&str> = text.split(':').collect();
        let (mix, seed, operations, threads, sectors) = match parts[..] {
            [mix, seed, operations, threads] => (mix, seed, operations, threads, None),
            [mix, seed, operations, threads, sectors] => {
                (mix, seed, operations, threads, Some(sectors))
            }
            _ => bail!(wrong()),
        };
        let mix = match mix {
            "writes" => Mix::Writes,
            "direct" => Mix::Direct,
            "discards" => Mix::Discards,
            _ => bail!(wrong()),
        };
        let number = |text: &str| text.parse::<u64>().with_context(wrong);
        let threads = u32::try_from(number(threads)?).with_context(wrong)?;
        ensure!(threads > 0, wrong());
        let range = |text: &str| {
            let (first, end) = text.split_once('-').with_context(wrong)?;
            let range = number(first)?..number(end)?;
            ensure!(!range.is_empty() && range.start.is_multiple_of(PAGE_SECTORS), wrong());
            Ok(range)
        };
        let sectors = sectors.map(range).transpose()?;
        Ok(Self { mix, seed: number(seed)?, operations: number(operations)?, threads, sectors })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Erasures {
    pub discards: u64,
    pub zeroings: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Write { sectors: Range<u64>, buffered: bool },
    Discard(Range<u64>),
    WriteZeroes(Range<u64>),
}

/// Storage on which programs can run. Sectors have the size given by the shape passed to [`run`].
pub trait Storage: Sync {
    fn enter(&self, _thread: u32) -> Result<()> {
        Ok(())
    }

    /// Writes whole sectors. If `buffered` is set, writes through the cache of the storage, if any.
    fn write(&self, first: u64, bytes: &[u8], buffered: bool) -> Result<()>;

    /// Discards sectors. They read as zeros afterwards.
    fn discard(&self, sectors: Range<u64>) -> Result<()>;

    fn write_zeroes(&self, sectors: Range<u64>) -> Result<()>;

    fn flush(&self) -> Result<()>;
}

impl Program {
    /// Returns the text of a program with up to four threads on 256 sectors. The range includes
    /// `border`, which lies inside the sectors of one thread.
    pub fn around(border: u64, mix: &str, seed: u64, operations: u64, threads: u32) -> String {
        let first = (border - STRIPE_SECTORS * 3 / 2) / PAGE_SECTORS * PAGE_SECTORS;
        format!("{mix}:{seed}:{operations}:{threads}:{first}-{}", first + STRIPE_SECTORS * 4)
    }

    /// Number of operations that begin before `border` and end after it.
    pub fn crossings(&self, shape: Shape, border: u64) -> usize {
        self.effects(shape)
            .filter(|(sectors, _)| sectors.start < border && border < sectors.end)
            .count()
    }

    pub fn erasures(&self, shape: Shape) -> Erasures {
        let steps = (0..self.threads).flat_map(|thread| self.steps(shape, thread));
        let mut erasures = Erasures::default();
        for (_, step) in steps {
            match step {
                Step::Write { .. } => {}
                Step::Discard(_) => erasures.discards += 1,
                Step::WriteZeroes(_) => erasures.zeroings += 1,
            }
        }
        erasures
    }

    fn steps(&self, shape: Shape, thread: u32) -> impl Iterator<Item = (u64, Step)> + use<> {
        let (mix, threads) = (self.mix, u64::from(self.threads));
        let all = self.sectors.clone().unwrap_or(0..shape.sectors);
        assert!(all.end <= shape.sectors, "{all:?} are not inside {} sectors", shape.sectors);
        let stripes = (all.end - all.start).div_ceil(STRIPE_SECTORS);
        let own_stripes = (stripes + threads - 1 - u64::from(thread)) / threads;
        assert!(own_stripes > 0, "{all:?} are too few sectors for {threads} threads");
        let mut numbers = Bytes::new(self.seed ^ u64::from(thread).rotate_left(32));
        let count = self.operations.div_ceil(threads);
        (0..count).map(move |number| {
            let stripe = numbers.below(own_stripes) * threads + u64::from(thread);
            let start = all.start + stripe * STRIPE_SECTORS;
            let end = (start + STRIPE_SECTORS).min(all.end);
            let first = start + numbers.below(end - start);
            let longest = 1 << numbers.below(u64::from(MAX_SECTORS.ilog2()) + 1);
            let len = (1 + numbers.below(longest)).min(end - first);
            let sectors = first..first + len;
            let step = match (mix, numbers.below(8)) {
                (Mix::Discards, 0) => Step::Discard(sectors),
                (Mix::Discards, 1) => Step::WriteZeroes(sectors),
                (Mix::Direct, _) => Step::Write { sectors, buffered: false },
                (_, kind) => Step::Write { sectors, buffered: kind % 2 == 0 },
            };
            (u64::from(thread) << 32 | number, step)
        })
    }

    /// Returns the effects of all operations. The order across threads does not matter, because
    /// each thread has its own sectors.
    pub(super) fn effects(&self, shape: Shape) -> impl Iterator<Item = (Range<u64>, Content)> {
        let seed = self.seed;
        (0..self.threads).flat_map(move |thread| self.steps(shape, thread)).map(
            move |(operation, step)| match step {
                Step::Write { sectors, .. } => (sectors, Content::Written { seed, operation }),
                Step::Discard(sectors) | Step::WriteZeroes(sectors) => (sectors, Content::Zeros),
            },
        )
    }
}

/// Runs all threads of a program to their end, including a final flush.
pub fn run(program: &Program, shape: Shape, storage: &impl Storage) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..program.threads)
            .map(|thread| scope.spawn(move || run_thread(program, shape, storage, thread)))
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a program does not panic"))
    })
}

fn run_thread(program: &Program, shape: Shape, storage: &impl Storage, thread: u32) -> Result<()> {
    storage.enter(thread)?;
    let sector_bytes = shape.sector_bytes as usize;
    let mut buffer = Aligned::zeroed(MAX_SECTORS as usize * sector_bytes);
    for (number, (operation, step)) in (1..).zip(program.steps(shape, thread)) {
        let done = match &step {
            Step::Write { sectors, buffered } => {
                let content = Content::Written { seed: program.seed, operation };
                let bytes = &mut buffer[..(sectors.end - sectors.start) as usize * sector_bytes];
                for (sector, bytes) in sectors.clone().zip(bytes.chunks_exact_mut(sector_bytes)) {
                    content.fill(sector, bytes);
                }
                storage.write(sectors.start, bytes, *buffered)
            }
            Step::Discard(sectors) => storage.discard(sectors.clone()),
            Step::WriteZeroes(sectors) => storage.write_zeroes(sectors.clone()),
        };
        done.with_context(|| format!("Operation {operation:#x} failed: {step:?}"))?;
        if number % FLUSH_INTERVAL == 0 {
            storage.flush().context("Cannot flush")?;
        }
    }
    storage.flush().context("Cannot flush")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SHAPE: Shape = Shape { sectors: 64 * 5 + 7, sector_bytes: 512 };

    fn all_steps(text: &str) -> Vec<(u32, Step)> {
        let program: Program = text.parse().unwrap();
        let steps = |thread| program.steps(SHAPE, thread).map(move |(_, step)| (thread, step));
        (0..program.threads).flat_map(steps).collect()
    }

    fn sectors(step: &Step) -> Range<u64> {
        match step {
            Step::Write { sectors, .. } | Step::Discard(sectors) | Step::WriteZeroes(sectors) => {
                sectors.clone()
            }
        }
    }

    #[test]
    fn threads_have_disjoint_sectors_and_cover_all() {
        let mut owners = BTreeMap::new();
        for (thread, step) in all_steps("writes:5:4000:3") {
            for sector in sectors(&step) {
                assert_eq!(*owners.entry(sector).or_insert(thread), thread, "sector {sector}");
            }
        }
        assert_eq!(owners.into_keys().collect::<Vec<_>>(), (0..SHAPE.sectors).collect::<Vec<_>>());
    }

    #[test]
    fn every_kind_and_length_occurs() {
        let steps = all_steps("discards:1:4000:2");
        let count =
            |wanted: fn(&Step) -> bool| steps.iter().filter(|(_, step)| wanted(step)).count();
        assert!(count(|step| matches!(step, Step::Discard(_))) > 300);
        assert!(count(|step| matches!(step, Step::WriteZeroes(_))) > 300);
        for buffered in [true, false] {
            let this = steps.iter().filter(|(_, step)| match step {
                Step::Write { buffered: found, .. } => *found == buffered,
                _ => false,
            });
            assert!(this.count() > 1000);
        }
        for len in 1..=MAX_SECTORS {
            let these = steps.iter().filter(|(_, step)| sectors(step).count() as u64 == len);
            assert!(these.count() > 0, "no operation of {len} sectors");
        }
        assert!(
            all_steps("writes:1:400:2").iter().all(|(_, step)| matches!(step, Step::Write { .. }))
        );
        let direct = |step: &Step| matches!(step, Step::Write { buffered: false, .. });
        assert!(all_steps("direct:1:400:2").iter().all(|(_, step)| direct(step)));
    }

    #[test]
    fn program_around_a_border_crosses_it_and_stays_near() {
        for (seed, border) in (0..40).zip(100..) {
            let text = Program::around(border, "writes", seed, 400, 4);
            let program: Program = text.parse().unwrap();
            assert!(program.crossings(SHAPE, border) > 0, "{text}");
            for (_, step) in all_steps(&text) {
                let Range { start, end } = sectors(&step);
                assert!(border <= start + 104 && end <= border + 160, "{text}: {step:?}");
            }
        }
        let program: Program = "writes:1:400:1:0-64".parse().unwrap();
        assert_eq!(program.crossings(SHAPE, 64), 0);
    }

    #[test]
    fn invalid_program_is_refused() {
        for text in [
            "",
            "writes",
            "writes:1:2",
            "reads:1:2:3",
            "writes:1:2:0",
            "writes:1:x:3",
            "writes:1:2:3:4",
            "writes:1:2:3:8-8",
            "writes:1:2:3:4-80",
            "writes:1:2:3:8-80:1",
        ] {
            assert!(text.parse::<Program>().is_err(), "{text:?}");
        }
    }
}
