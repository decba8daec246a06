//! Time and memory to open a large pool: `docs/design/benchmarks.md`.
//!
//! The benchmark creates a pool of 1 TiB through the public API on a sparse tmpfs. The pool has
//! 10^5 used extents, and as many free ones between them. New processes open it, and report the
//! time and their peak resident memory.

use std::env;
use std::ffi::CString;
use std::io;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::time::Instant;

use pmem_volume::{CHUNK_BYTES, ChunkId, Extent, OpenMode, Pool, VolumeFormat, VolumeSize};

const POOL_BYTES: u64 = 1 << 40;
/// Size of the pool in a trial run, and if the file system has no space for a large pool.
const SMALL_POOL_BYTES: u64 = 4 << 30;
const VOLUMES: u64 = 100;
const ROUNDS: usize = 7;
const CHILD: &str = "FORESHORE_BENCH_OPEN";

fn main() {
    if let Some(mode) = env::var_os(CHILD) {
        let path = env::args_os().nth(1).expect("the pool");
        let mode = if mode == "write" { OpenMode::ReadWrite } else { OpenMode::Peek };
        return open_and_report(Path::new(&path), mode);
    }
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    // cargo bench passes --bench.
    let whole = env::args().any(|argument| argument == "--bench");
    let size_bytes = match own_tmpfs(folder.path()) {
        Ok(()) if whole => POOL_BYTES,
        Ok(()) => SMALL_POOL_BYTES,
        Err(error) => {
            println!("cannot mount a private tmpfs ({error}): using a small pool");
            SMALL_POOL_BYTES
        }
    };
    let path = folder.path().join("pool");
    make_pool(&path, size_bytes);
    println!(
        "\n| open 1 TiB for | time | of the CPU | memory before | peak |\n|---|---|---|---|---|"
    );
    for mode in ["write", "peek"] {
        let mut lines: Vec<String> = (0..ROUNDS).map(|_| in_child(&path, mode)).collect();
        // Sorts the lines by time, which is the first field and has a fixed width.
        lines.sort();
        println!("| {mode}, median of {ROUNDS} | {} |", lines[ROUNDS / 2]);
        println!("| {mode}, least | {} |", lines[0]);
    }
}

/// Mounts a tmpfs that is larger than the memory. Only this process and its children can see it.
fn own_tmpfs(folder: &Path) -> io::Result<()> {
    let done =
        |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    let (tmpfs, options) = (c"tmpfs", c"size=2t");
    let folder = CString::new(folder.as_os_str().as_encoded_bytes()).expect("a path has no zero");
    // SAFETY: the system calls take numbers, and strings that outlive them. There are no other
    // threads yet.
    unsafe {
        if libc::geteuid() == 0 {
            done(libc::unshare(libc::CLONE_NEWNS))?;
        } else {
            done(libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWUSER))?;
        }
        let private = libc::MS_PRIVATE | libc::MS_REC;
        done(libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), private, ptr::null()))?;
        done(libc::mount(
            tmpfs.as_ptr(),
            folder.as_ptr(),
            tmpfs.as_ptr(),
            0,
            options.as_ptr().cast(),
        ))
    }
}

/// Creates volumes that consist of pieces of two chunks, with three free chunks between the pieces.
///
/// 1. Lend the whole pool.
/// 2. Return two of every five chunks.
/// 3. Create volumes, which get these chunks because no others are free.
/// 4. Return the rest.
fn make_pool(path: &Path, size_bytes: u64) {
    let start = Instant::now();
    let pool = Pool::create(path, size_bytes, 0).unwrap();
    let lent = pool.alloc_memory(pool.info().free_bytes).unwrap();
    let chunks = |extent: &Extent| (extent.start.0..extent.start.0 + extent.chunks()).map(ChunkId);
    let lent: Vec<ChunkId> = lent.iter().flat_map(chunks).collect();
    let is_first = |chunk: &ChunkId| chunk.0 % 5 < 2;
    let (first, rest): (Vec<_>, Vec<_>) = lent.into_iter().partition(is_first);
    let first: Vec<_> = first.into_iter().map(Extent::chunk).collect();
    let rest: Vec<_> = rest.into_iter().map(Extent::chunk).collect();
    pool.free_memory(&first).unwrap();
    pool.scrub_all().unwrap();
    let volume_bytes = first.len() as u64 / VOLUMES * CHUNK_BYTES;
    for volume in 0..VOLUMES {
        let name = format!("volume-{volume}");
        pool.create_volume(&name, VolumeSize::Bytes(volume_bytes), VolumeFormat::Raw).unwrap();
    }
    pool.free_memory(&rest).unwrap();
    pool.scrub_all().unwrap();
    let extents: u32 = pool.volumes().iter().map(|volume| volume.extents).sum();
    let info = pool.info();
    println!(
        "a pool of {} GiB: {extents} extents in {} volumes, {} GiB free; made in {:.1} s",
        info.total_bytes >> 30,
        info.volumes,
        info.free_bytes >> 30,
        start.elapsed().as_secs_f64()
    );
}

fn in_child(path: &Path, mode: &str) -> String {
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.arg(path).env(CHILD, mode).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

fn open_and_report(path: &Path, mode: OpenMode) {
    let before_kib = peak_kib();
    let (start, start_cpu_ms) = (Instant::now(), cpu_ms());
    let pool = Pool::open(path, mode).unwrap();
    let (ms, cpu_ms) = (start.elapsed().as_secs_f64() * 1e3, cpu_ms() - start_cpu_ms);
    let peak_kib = peak_kib();
    assert!(pool.info().volumes > 0);
    let [before_mib, peak_mib] = [before_kib, peak_kib].map(|kib| kib as f64 / 1024.0);
    println!("{ms:6.1} ms | {cpu_ms:.1} ms | {before_mib:.1} MiB | {peak_mib:.1} MiB");
}

/// Returns the CPU time of this process. Elapsed time would include other processes on a busy
/// machine.
fn cpu_ms() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system call fills the struct.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every process has that clock");
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

/// Returns the peak of resident memory plus page tables. It includes mapped pages of the file
/// (proc(5), VmHWM and VmPTE).
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    field("VmHWM:") + field("VmPTE:")
}
