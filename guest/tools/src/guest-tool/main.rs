//! Guest program that performs test steps that a shell cannot perform.

mod blocks;
mod burst;
mod exhausted_memory;
mod exits;
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
  guest-tool hog MIB
      allocate incompressible memory and keep it
  guest-tool touch MIB
      allocate memory, and read all of it several times per second
  guest-tool burst MIB
      touch memory at once and keep it. Print when the load began and when memory was added, in
      microseconds. With 0, only print when memory was added
  guest-tool leak MIB RATE
      allocate memory at RATE MiB/s and keep it
  guest-tool load NAME MIB
      run a workload of this size: touch, bfs, redis, sqlite or compile. Print the duration of
      its phases in microseconds, and a sum that is equal in each run
  guest-tool watch MILLISECONDS
      print a line with the memory use after each interval
  guest-tool counters
      print one line of watch
  guest-tool pin MIB
      fill memory and free it, except one unmovable page of every 2 MiB
  guest-tool dry KIB
      take the kernel's free memory except KIB, and memory that is freed later. Print dried when
      no memory is left, and then failed whenever page descriptors cannot be allocated
  guest-tool make-files DIR COUNT
      create empty files
  guest-tool miss-files DIR COUNT
      look up files that do not exist
  guest-tool fill-sockets MIB
      queue data in sockets and keep it
  guest-tool map-by-processes FILE COUNT
      start processes that map a file, and keep them running
  guest-tool write-files DIR BYTES
      write files with fsync until killed. Print a line per file: name hash
  guest-tool check-files DIR LIST
      compare files with the lines that write-files printed
  guest-tool fill-files DIR SEED
      write files until the file system is full, and print their number
  guest-tool check-filled DIR SEED COUNT
      check that exactly the files of fill-files exist and are complete
  guest-tool write-blocks DEVICE direct|buffered FIRST COUNT SEED ROUNDS
      write and verify 4 KiB blocks in shuffled order
  guest-tool check-blocks DEVICE FIRST COUNT SEED ROUND
      check that every block is from ROUND or from the next round
  guest-tool write-stamped DEVICE FIRST COUNT THREADS LONGEST SEED
      write and flush stamped 4 KiB sectors until killed. Each thread has COUNT sectors and
      writes up to LONGEST before a flush. Print a line per flush
  guest-tool time-blocks DEVICE read|write COUNT [DEPTH]
      time direct 4 KiB transfers, DEPTH (1) at a time, in microseconds
  guest-tool time-exits COUNT
      time COUNT reads of PCI configuration space, which are exits to the VMM, in microseconds
  guest-tool net-serve PORT
      serve the network transfers of net-time
  guest-tool net-time ADDRESS:PORT send|receive BYTES
      time a transfer to or from net-serve, in microseconds
  guest-tool net-time ADDRESS:PORT round-trip COUNT
      print the median time of COUNT round trips of a byte
  guest-tool write-sectors DEVICE PROGRAM
      run a seeded program: writes:SEED:OPERATIONS:THREADS[:FIRST-END]. With direct: instead of
      writes:, bypass the page cache. With discards:, discard sectors too
  guest-tool check-sectors DEVICE [HISTORY...]
      check that every sector has the content that the programs of HISTORY leave. The first item
      may be flogs:SHIFT. Exit with code 78 if a sector differs
  guest-tool map-store FILE OFFSET BYTES SEED
      map a file, store the words SEED, SEED + 1, ..., and keep the mapping until killed
  guest-tool map-store-sync FILE OFFSET BYTES SEED
      do the same with MAP_SYNC and a fence, after which the words should be durable
  guest-tool map-transfer FILE BYTES SEED DISK
      store such words in a mapped file, and repeatedly write them from the mapping to the start
      of a disk until killed
  guest-tool map-check FILE OFFSET BYTES SEED
      map a file and compare it with such words
  guest-tool map-wait FILE OFFSET BYTES WORD
      map a file and poll until its first word is WORD
  guest-tool map-sync FILE BYTES
      print allowed if programs may map the file with MAP_SYNC, or refused
  guest-tool extents FILE
      print the extents of a file: offset in the file, offset on the device, length
  guest-tool stream ARRAY_MIB ROUNDS node=N|file=PATH...
      run copy, scale, add and triad on arrays in each place in turn. Print kernel, place and
      microseconds
  guest-tool write-tree DIR SEED FILES
      write a tree like that of a kernel's source
  guest-tool time COMMAND
      run a shell command and print its duration in microseconds
  guest-tool vsock-send PORT
      send standard input to a port of the host
  guest-tool vsock-hold PORT COMMAND
      open connections to a port of the host endlessly. When the host first refuses one, print
      held COUNT and run a shell command
  guest-tool hostile-range ID FIRST END FILE
      pass buffers in a memory range to the virtio device with PCI device ID until FILE exists
  guest-tool hostile-frames ID FIRST END FILE
      send and receive frames in such a range with a network device until FILE exists
  guest-tool hostile-garbage ID COUNT
      send COUNT malformed chains to the device
  guest-tool hostile-plugs BLOCKS FILE
      plug and unplug the first blocks of the virtio-mem device in a loop until FILE exists
  guest-tool negotiate-without ID BIT
      check that the device rejects a driver without the feature BIT";

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
        ["time-exits", count] => exits::time(number(count)?),
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
