//! Guest program that performs test steps that a shell cannot perform.

mod blocks;
mod burst;
mod exhausted_memory;
mod files;
mod filled_folder;
mod hostile;
mod kernel_loads;
mod limits;
mod load;
mod mapped;
mod memory;
mod sectors;
mod stamped;
mod stream;
mod tree;
mod vsock;

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::process::{Command, exit};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_tools::CorruptData;
use guest_tools::timed_net;
use guest_tools::torn::report::Area;

const USAGE: &str = "\
usage:
  guest-tool hog MIB                             hold that much memory, which does not compress
  guest-tool touch MIB                           hold that much memory and read all of it several times a second
  guest-tool burst MIB                           touch that much at once, and hold it; when it began and memory was added, in
                                                 microseconds. 0: only when memory was added
  guest-tool leak MIB RATE                       take that much at so many MiB/s, and hold it
  guest-tool load NAME MIB                       a workload of that size: touch, bfs, redis, sqlite, compile; how long its
                                                 phases took in microseconds, and a sum that is always the same
  guest-tool watch MILLISECONDS                  what memory there is and is used, a line for each interval
  guest-tool counters                            one such line
  guest-tool pin MIB                             fill that much memory and give it back, but for a page of every 2 MiB that
                                                 cannot be moved
  guest-tool dry KIB                             take what the guest's kernel has left for itself, but for so much, and what
                                                 becomes free later; `dried` once there is no more, then `failed` each
                                                 time that there is none for page descriptors
  guest-tool make-files DIR COUNT                 make so many empty files
  guest-tool miss-files DIR COUNT                 look for so many files that are not there
  guest-tool fill-sockets MIB                     queue so much data in sockets, and hold it
  guest-tool map-by-processes FILE COUNT          start so many processes that map a file, and hold them
  guest-tool write-files DIR BYTES               write files with fsync until killed; a line per file: name hash
  guest-tool check-files DIR LIST                compare files with such lines
  guest-tool fill-files DIR SEED                 write files until there is no room, and print how many fit
  guest-tool check-filled DIR SEED COUNT         exactly those files are there, and whole
  guest-tool write-blocks DEVICE direct|buffered FIRST COUNT SEED ROUNDS
                                                 write and verify 4 KiB blocks, in shuffled order
  guest-tool check-blocks DEVICE FIRST COUNT SEED ROUND
                                                 every block is that of the round, or of the one before
  guest-tool write-stamped DEVICE FIRST COUNT THREADS LONGEST SEED
                                                 write and flush 4 KiB sectors that say what they are until killed:
                                                 threads with COUNT of them each, LONGEST between two flushes; a line
                                                 per flush
  guest-tool time-blocks DEVICE read|write COUNT [DEPTH]
                                                 time direct 4 KiB transfers, so many (1) at a time: microseconds
  guest-tool net-serve PORT                      the other end of what is timed on a network
  guest-tool net-time ADDRESS:PORT send|receive BYTES
                                                 time a transfer to or from such an end: microseconds
  guest-tool net-time ADDRESS:PORT round-trip COUNT
                                                 the median of so many bytes there and back
  guest-tool write-sectors DEVICE PROGRAM        run a seeded program: writes:SEED:OPERATIONS:THREADS[:FIRST-END];
                                                 direct:... does not use the page cache, discards:... discards as well
  guest-tool check-sectors DEVICE [HISTORY...]
                                                 every sector is as those programs leave it, and before them flogs:SHIFT;
                                                 exit code 78 if one is not
  guest-tool map-store FILE OFFSET BYTES SEED    map it, store the words SEED, SEED + 1, ..., and keep it until killed
  guest-tool map-store-sync FILE OFFSET BYTES SEED
                                                 the same with MAP_SYNC and a fence, after which they should be durable
  guest-tool map-transfer FILE BYTES SEED DISK   store such words in it, and write them from there to the start of a disk,
                                                 again and again until killed: the disk reads what is mapped
  guest-tool map-check FILE OFFSET BYTES SEED    map it and compare it with such words
  guest-tool map-wait FILE OFFSET BYTES WORD     map it and look until its first word is that one
  guest-tool map-sync FILE BYTES                 may a program map it with MAP_SYNC: allowed or refused
  guest-tool extents FILE                        where it lies: offset in the file, on the device, length
  guest-tool stream ARRAY_MIB ROUNDS node=N|file=PATH...
                                                 copy, scale, add and triad over arrays in those places, in turns:
                                                 kernel, place, microseconds
  guest-tool write-tree DIR SEED FILES           write a tree like that of a kernel's source
  guest-tool time COMMAND                        run it in a shell: microseconds
  guest-tool vsock-send PORT                     send the standard input to the host's port
  guest-tool vsock-hold PORT COMMAND             connect to the host's port without end; `held COUNT` when the host
                                                 refuses the first connection, and then run the command in a shell
  guest-tool hostile-range ID FIRST END FILE     give the virtio device with that PCI id buffers in a range of memory,
                                                 until the file is there
  guest-tool hostile-frames ID FIRST END FILE    frames to and from there, of a network device, until there is such a FILE
  guest-tool hostile-garbage ID COUNT            give it so many chains that are wrong in every way
  guest-tool hostile-plugs BLOCKS FILE           plug and unplug the first blocks of the virtio-mem device in a loop, until
                                                 the file is there
  guest-tool negotiate-without ID BIT            be refused by it as a driver that lacks one of its features";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("Error: {error:?}");
        exit(CorruptData::code_of(&error));
    }
}

fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        ["hog", mib] => memory::hog(number(mib)?),
        ["touch", mib] => memory::touch(number(mib)?),
        ["burst", mib] => burst::burst(number(mib)?),
        ["leak", mib, rate] => load::leak(number(mib)?, number(rate)?),
        ["load", name, mib] => load::run(name, number(mib)?),
        ["watch", interval_ms] => load::watch(number(interval_ms)?),
        ["counters"] => load::print_counters(),
        ["pin", mib] => memory::pin(number(mib)?),
        ["dry", left_kib] => exhausted_memory::exhaust(number(left_kib)?),
        ["make-files", dir, count] => kernel_loads::make_files(dir.as_ref(), number(count)?),
        ["miss-files", dir, count] => {
            kernel_loads::look_up_missing_files(dir.as_ref(), number(count)?)
        }
        ["fill-sockets", mib] => kernel_loads::fill_sockets(number(mib)?),
        ["map-by-processes", file, count] => {
            kernel_loads::map_by_processes(file.as_ref(), number(count)?)
        }
        ["write-files", dir, bytes] => files::write(dir.as_ref(), number(bytes)?),
        ["check-files", dir, list] => files::check(dir.as_ref(), list.as_ref()),
        ["fill-files", dir, seed] => filled_folder::fill(dir.as_ref(), number(seed)?),
        ["check-filled", dir, seed, count] => {
            filled_folder::check(dir.as_ref(), number(seed)?, number(count)?)
        }
        ["write-blocks", device, mode, first, count, seed, rounds] => blocks::write(
            &blocks::Range::open(
                device,
                blocks::Mode::parse(mode)?,
                number(first)?,
                number(count)?,
            )?,
            number(seed)?,
            number(rounds)?,
        ),
        ["check-blocks", device, first, count, seed, round] => blocks::check(
            &blocks::Range::open(device, blocks::Mode::Direct, number(first)?, number(count)?)?,
            number(seed)?,
            number(round)?,
        ),
        ["write-stamped", device, first, count, threads, longest, seed] => {
            let area = Area {
                first: number(first)?,
                per_thread: number(count)?,
                threads: number(threads)?,
            };
            stamped::write(&stamped::Target::new(device, area, number(longest)?)?, number(seed)?)
        }
        ["time-blocks", device, what, count] => blocks::time(device, what, number(count)?, 1),
        ["time-blocks", device, what, count, depth] => {
            blocks::time(device, what, number(count)?, number(depth)?)
        }
        ["net-serve", port] => net_serve(u16::try_from(number(port)?)?),
        ["net-time", server, what, count] => {
            net_time(server, what, usize::try_from(number(count)?)?)
        }
        ["write-sectors", device, program] => sectors::write(device, program),
        ["check-sectors", device, history @ ..] => sectors::check(device, history),
        ["map-store", file, offset, bytes, seed] => {
            let care = mapped::Care::None;
            mapped::store(file.as_ref(), number(offset)?, number(bytes)?, number(seed)?, care)
        }
        ["map-store-sync", file, offset, bytes, seed] => {
            let care = mapped::Care::Fence;
            mapped::store(file.as_ref(), number(offset)?, number(bytes)?, number(seed)?, care)
        }
        ["map-transfer", file, bytes, seed, disk] => {
            mapped::transfer(file.as_ref(), number(bytes)?, number(seed)?, disk.as_ref())
        }
        ["map-check", file, offset, bytes, seed] => {
            mapped::check(file.as_ref(), number(offset)?, number(bytes)?, number(seed)?)
        }
        ["map-wait", file, offset, bytes, word] => {
            mapped::wait_for_word(file.as_ref(), number(offset)?, number(bytes)?, number(word)?)
        }
        ["map-sync", file, bytes] => mapped::print_map_sync(file.as_ref(), number(bytes)?),
        ["extents", file] => mapped::print_extents(file.as_ref()),
        ["stream", array_mib, rounds, places @ ..] if !places.is_empty() => {
            stream::stream(number(array_mib)?, number(rounds)?, places)
        }
        ["write-tree", dir, seed, files] => {
            tree::write(dir.as_ref(), number(seed)?, number(files)?)
        }
        ["time", command] => time(command),
        ["vsock-send", port] => vsock::send(u32::try_from(number(port)?)?),
        ["vsock-hold", port, command] => vsock::hold(u32::try_from(number(port)?)?, command),
        ["hostile-range", id, first, end, file] => {
            let attack = hostile::Attack::Range { first: number(first)?, end: number(end)? };
            hostile::run(number(id)?, attack, &hostile::Until::Exists(file.into()))
        }
        ["hostile-frames", id, first, end, file] => {
            let attack = hostile::Attack::Frames { first: number(first)?, end: number(end)? };
            hostile::run(number(id)?, attack, &hostile::Until::Exists(file.into()))
        }
        ["hostile-garbage", id, count] => hostile::run(
            number(id)?,
            hostile::Attack::Garbage,
            &hostile::Until::Sent(number(count)?),
        ),
        ["hostile-plugs", blocks, file] => hostile::plug_storm(
            u16::try_from(number(blocks)?)?,
            &hostile::Until::Exists(file.into()),
        ),
        ["negotiate-without", id, feature] => {
            hostile::negotiate_without(number(id)?, number(feature)?)
        }
        _ => bail!("{USAGE}"),
    }
}

fn time(command: &str) -> Result<()> {
    let started = Instant::now();
    let status =
        Command::new("sh").args(["-c", command]).status().context("Cannot start a shell")?;
    let elapsed = started.elapsed();
    ensure!(status.success(), "`{command}` ended with {status}");
    println!("{}", elapsed.as_micros());
    Ok(())
}

fn net_serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).context("Cannot listen")?;
    println!("listening");
    timed_net::serve(&listener)
}

fn net_time(server: &str, what: &str, count: usize) -> Result<()> {
    let server: SocketAddrV4 =
        server.parse().with_context(|| format!("not ADDRESS:PORT: {server:?}"))?;
    let took: Duration = match what {
        "send" => timed_net::send(server, count)?,
        "receive" => timed_net::receive(server, count)?,
        "round-trip" => timed_net::round_trip(server, count)?,
        other => bail!("neither send, receive nor round-trip: {other:?}"),
    };
    println!("{}", took.as_micros());
    Ok(())
}

fn number(text: &str) -> Result<u64> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.with_context(|| format!("not a number: {text:?}\n{USAGE}"))
}
