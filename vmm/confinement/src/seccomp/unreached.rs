//! Comparison of the tables with traces of strace(1): calls that no test reaches, and calls that a
//! table lacks. `cargo xtask calls` records traces and runs the comparison.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use libc::{SYS_clone, SYS_clone3, SYS_fork, SYS_vfork};
use syscall_numbers::x86_64::sys_call_name;

use super::calls::{Allowed, Condition, allowed, every_thread};
use crate::thread::ThreadKind;

/// Variable with the paths of traces, separated by colons.
const TRACES: &str = "FORESHORE_CALL_TRACES";

/// Calls that create a thread or a process.
const CREATORS: [i64; 4] = [SYS_clone, SYS_clone3, SYS_fork, SYS_vfork];

/// System call of a thread that has a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Made {
    /// Position in [`ThreadKind::ALL`].
    kind: usize,
    call: i64,
    arguments: [u64; 6],
}

/// Line of a trace, as `strace -f -n -Y -e raw=all` prints it:
///
/// ```text
/// 4711<_api> [ 257] openat(0xffffffffffffff9c, 0x7ffd, 0) = 0x5
/// ```
struct Line<'a> {
    thread: u64,
    name: &'a str,
    call: i64,
    /// `None` if the line only has the result of a call of an earlier line.
    arguments: Option<[u64; 6]>,
    result: Option<u64>,
}

/// Entry of a trace.
enum Entry<'a> {
    Call(Line<'a>),
    /// End of a thread, whose ID may then be used again: `4711<_api> +++ exited with 0 +++`.
    End {
        thread: u64,
    },
}

impl<'a> Entry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        match line.split_once("> +++ ") {
            Some((start, _)) => {
                let (thread, _) = start.split_once('<')?;
                Some(Self::End { thread: thread.trim().parse().ok()? })
            }
            None => Line::parse(line).map(Self::Call),
        }
    }
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (thread, rest) = line.split_once('<')?;
        let (name, rest) = rest.split_once("> [")?;
        let (call, rest) = rest.split_once("] ")?;
        let given =
            rest.split_once('(').filter(|_| !rest.starts_with("<...")).map(|(_, rest)| rest);
        let number = |text: &str| {
            let text = text.trim();
            let hex = text.strip_prefix("0x").map(|hex| u64::from_str_radix(hex, 16).ok());
            hex.unwrap_or_else(|| text.parse().ok())
        };
        let arguments = given.map(|given| {
            let end = given.find([')', '<']).unwrap_or(given.len());
            let mut arguments = [0; 6];
            for (argument, text) in arguments.iter_mut().zip(given[..end].split(',')) {
                *argument = number(text).unwrap_or_default();
            }
            arguments
        });
        let result = rest.rsplit_once(" = ").and_then(|(_, result)| number(result));
        let call = call.trim().parse().ok()?;
        Some(Self { thread: thread.trim().parse().ok()?, name, call, arguments, result })
    }
}

/// Creations of threads and processes, by the ID of the new thread. Each is the position of the
/// entry where the call begins, because the new thread may appear before the result.
fn creations(entries: &[Entry]) -> BTreeMap<u64, Vec<usize>> {
    let (mut begun, mut creations) = (BTreeMap::new(), BTreeMap::<u64, Vec<usize>>::new());
    for (nth, entry) in entries.iter().enumerate() {
        let Entry::Call(line) = entry else { continue };
        if !CREATORS.contains(&line.call) {
            continue;
        }
        if line.arguments.is_some() {
            begun.insert(line.thread, nth);
        }
        if let Some(created) = line.result
            && let Some(start) = begun.remove(&line.thread)
        {
            creations.entry(created).or_default().push(start);
        }
    }
    creations
}

/// Returns the calls of a trace that a filter has checked.
fn made(trace: &str) -> BTreeSet<Made> {
    let entries: Vec<_> = trace.lines().filter_map(Entry::parse).collect();
    let creations = creations(&entries);
    // Filters of live threads, and for each creation the filter that the new thread inherits.
    let mut filters = BTreeMap::<u64, Option<usize>>::new();
    let mut inherited = BTreeMap::<usize, Option<usize>>::new();
    let mut made = BTreeSet::new();
    for (nth, entry) in entries.iter().enumerate() {
        let line = match entry {
            Entry::Call(line) => line,
            Entry::End { thread } => {
                filters.remove(thread);
                continue;
            }
        };
        let filter = filters.entry(line.thread).or_insert_with(|| {
            let starts = creations.get(&line.thread)?;
            let last = starts.iter().rev().find(|start| **start < nth)?;
            // Each creation is used by one thread. A thread without one has an unknown creator.
            inherited.remove(last)?
        });
        let Some(mut arguments) = line.arguments else { continue };
        if CREATORS.contains(&line.call) {
            inherited.insert(nth, *filter);
        }
        if line.call == libc::SYS_tgkill {
            // The tables contain the ID of this process, and the trace that of the VMM.
            arguments[0] = std::process::id().into();
        }
        made.extend(filter.map(|kind| Made { kind, call: line.call, arguments }));
        let mode = libc::SECCOMP_SET_MODE_FILTER.into();
        if line.call == libc::SYS_seccomp && arguments[0] == mode {
            // A process enters the filter of set-up first, under any name.
            let kind = ThreadKind::of_name(line.name).unwrap_or(ThreadKind::SetUp);
            *filter = ThreadKind::ALL.iter().position(|one| *one == kind);
        }
    }
    made
}

impl Condition {
    fn holds(&self, arguments: &[u64; 6]) -> bool {
        self.values.contains(&(arguments[usize::from(self.argument)] & self.mask))
    }

    /// Returns a condition for each value.
    fn single(&self) -> impl Iterator<Item = Self> {
        self.values.iter().map(|value| Self { values: vec![*value], ..self.clone() })
    }
}

impl Allowed {
    fn allows(&self, made: &Made) -> bool {
        let holds = |condition: &Condition| condition.holds(&made.arguments);
        self.call == made.call && self.conditions.iter().all(holds)
    }

    /// Returns an entry for each value of a condition, because tests may reach only some of them.
    fn single(&self) -> Vec<Self> {
        let [condition] = &self.conditions[..] else { return vec![self.clone()] };
        let one = |condition| Self { call: self.call, conditions: vec![condition] };
        condition.single().map(one).collect()
    }

    fn text(&self) -> String {
        let name = sys_call_name(self.call).unwrap_or("unknown");
        let of =
            |condition: &Condition| format!(" {}={:#x}", condition.argument, condition.values[0]);
        self.conditions.iter().map(of).fold(name.to_owned(), |text, condition| text + &condition)
    }
}

/// Entries that no thread has reached, each with the kind of thread, or with `every thread`.
fn unreached(made: &BTreeSet<Made>) -> Vec<String> {
    let mut found = Vec::new();
    let common: Vec<_> = every_thread().iter().flat_map(Allowed::single).collect();
    let is_made = |entry: &Allowed, kind: Option<usize>| {
        made.iter().any(|made| kind.is_none_or(|kind| made.kind == kind) && entry.allows(made))
    };
    let all = common.iter().filter(|entry| !is_made(entry, None));
    found.extend(all.map(|entry| format!("every thread: {}", entry.text())));
    let mut own_of_others = Vec::new();
    // The table of the first kind includes those of all others.
    for (nth, kind) in ThreadKind::ALL.iter().enumerate().rev() {
        let mut own: Vec<_> = allowed(*kind).iter().flat_map(Allowed::single).collect();
        own.retain(|entry| !common.contains(entry));
        if *kind == ThreadKind::SetUp {
            own.retain(|entry| !own_of_others.contains(entry));
        }
        let mut missing: Vec<_> = own.iter().filter(|entry| !is_made(entry, Some(nth))).collect();
        missing.dedup();
        found.extend(missing.iter().map(|entry| format!("{kind:?}: {}", entry.text())));
        own_of_others.extend(own);
    }
    found
}

/// Calls that the table of the thread lacks.
fn lacking(made: &BTreeSet<Made>) -> BTreeSet<String> {
    let tables = ThreadKind::ALL.map(allowed);
    // Filters make clone3() fail on purpose.
    let is_allowed = |made: &&Made| {
        made.call == libc::SYS_clone3 || tables[made.kind].iter().any(|entry| entry.allows(made))
    };
    let text = |made: &Made| {
        let name = sys_call_name(made.call).unwrap_or("unknown");
        let [first, second, third, ..] = made.arguments;
        format!("{:?}: {name}({first:#x}, {second:#x}, {third:#x})", ThreadKind::ALL[made.kind])
    };
    made.iter().filter(|made| !is_allowed(made)).map(text).collect()
}

#[test]
fn traces_are_compared_with_the_tables() {
    let Ok(paths) = std::env::var(TRACES) else {
        return eprintln!("skipped: {TRACES} names no traces");
    };
    let mut all = BTreeSet::new();
    for path in paths.split(':') {
        let made = made(&fs::read_to_string(path).unwrap());
        assert!(!made.is_empty(), "no thread in {path} has a filter");
        all.extend(made);
    }
    let (unreached, lacking) = (unreached(&all), lacking(&all));
    println!("{} allowed calls that no trace has:", unreached.len());
    unreached.iter().for_each(|line| println!("  {line}"));
    println!("{} calls that a filter does not allow:", lacking.len());
    lacking.iter().for_each(|line| println!("  {line}"));
    assert!(lacking.is_empty());
}

#[test]
fn calls_count_after_a_filter_and_are_inherited() {
    let trace = "\
        7<sh> [ 257] openat(0xffffff9c, 0x1, 0) = 0x3\n\
        7<sh> [ 317] seccomp(0x1, 0, 0x5) = 0\n\
        7<sh> [  56] clone(0x3d0f00, 0x1 <unfinished ...>\n\
        8<sh> [  24] sched_yield() = 0\n\
        7<sh> [  56] <... clone resumed>, 0x1, 0x1) = 0x8\n\
        8<vcpu0> [ 317] seccomp(0x1, 0, 0x5) = 0\n\
        8<vcpu0> [  16] ioctl(0x9, 0xae80, 0 <unfinished ...>\n\
        8<vcpu0> [  62] kill(0x7, 0x9) = 0xffffffffffffffff\n";
    let made = made(trace);
    let calls: Vec<_> = made.iter().map(|made| (ThreadKind::ALL[made.kind], made.call)).collect();
    assert!(!calls.contains(&(ThreadKind::SetUp, libc::SYS_openat)), "{calls:?}");
    assert!(calls.contains(&(ThreadKind::SetUp, libc::SYS_sched_yield)), "{calls:?}");
    assert!(calls.contains(&(ThreadKind::Vcpu, libc::SYS_ioctl)), "{calls:?}");
    let lacking: Vec<_> = lacking(&made).into_iter().collect();
    assert_eq!(lacking, ["Vcpu: kill(0x7, 0x9, 0x0)"]);
    let unreached = unreached(&made);
    assert!(!unreached.contains(&"Vcpu: ioctl 1=0xae80".to_owned()), "{unreached:?}");
    assert!(unreached.contains(&"Vcpu: ioctl 1=0xae61".to_owned()), "{unreached:?}");
    assert!(!unreached.contains(&"every thread: sched_yield".to_owned()), "{unreached:?}");
}

#[test]
fn thread_with_an_id_of_an_earlier_thread_has_its_own_filter() {
    let trace = "\
        7<foreshore> [ 317] seccomp(0x1, 0, 0x5) = 0\n\
        7<foreshore> [  56] clone(0x3d0f00, 0x1, 0x1) = 0x8\n\
        8<vcpu0> [ 317] seccomp(0x1, 0, 0x5) = 0\n\
        8<vcpu0> [  60] exit(0) = ?\n\
        8<vcpu0> +++ exited with 0 +++\n\
        7<foreshore> [  56] clone(0x3d0f00, 0x1, 0x1 <unfinished ...>\n\
        8<foreshore> [  41] socket(0x1, 0x1, 0) = 0x3\n\
        7<foreshore> [  56] <... clone resumed>) = 0x8\n\
        8<foreshore> +++ exited with 0 +++\n\
        9<sh> [  57] fork() = 0x8\n\
        8<sh> [  59] execve(0x1, 0x1, 0x1) = 0\n";
    let made = made(trace);
    let kinds_of = |call| made.iter().filter(move |made| made.call == call);
    let kinds = |call| kinds_of(call).map(|made| ThreadKind::ALL[made.kind]).collect::<Vec<_>>();
    assert_eq!(kinds(libc::SYS_socket), [ThreadKind::SetUp]);
    assert_eq!(kinds(libc::SYS_execve), []);
    assert_eq!(kinds(libc::SYS_exit), [ThreadKind::Vcpu]);
}
