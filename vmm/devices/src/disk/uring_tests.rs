use std::ffi::CStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, flock, memfd_create};

use super::*;
use crate::disk::image::ImageOptions;
use crate::disk::range::Unmap;

const MIB: u64 = 1 << 20;
const IMAGE_BYTES: u64 = 8 * MIB;
const NAME: &CStr = c"image";

/// In-memory image, on a file system that can punch holes but cannot mark blocks as zero.
fn image() -> (File, Arc<RawImage>) {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file = File::from(memfd_create(NAME, flags).unwrap());
    file.set_len(IMAGE_BYTES).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let options = ImageOptions { sparse: true, ..ImageOptions::default() };
    let image = RawImage::open(Path::new(&path), options).unwrap();
    (file, image)
}

/// Creates a ring. Returns `None` and prints the reason if the kernel refuses a ring, as in many
/// containers.
fn ring(image: &Arc<RawImage>) -> Option<Uring> {
    if let Err(err) = IoUring::new(1) {
        eprintln!("skipped: io_uring is not available: {err}");
        return None;
    }
    Some(Uring::new(Arc::clone(image), 16).unwrap())
}

fn buffer(len: u64, byte: u8) -> Buffer {
    let mut buffer = Buffers::default().take(len as usize);
    buffer.bytes_mut().fill(byte);
    buffer
}

/// Steps of every kind on separate parts of the image, so that they can run concurrently.
fn steps() -> Vec<Step> {
    vec![
        Step::Write(0, buffer(MIB, 1)),
        Step::Read(MIB, buffer(MIB, 9)),
        Step::WriteZeroes(DiskRange::at(2 * MIB + 512, 2 * MIB), Unmap::Forbidden),
        Step::WriteZeroes(DiskRange::at(5 * MIB, MIB), Unmap::Allowed),
        Step::Discard(DiskRange::at(6 * MIB, MIB)),
        Step::Flush,
    ]
}

/// Executes all steps. Returns their results by token.
fn carry_out(ring: &mut Uring, steps: Vec<Step>) -> Vec<Done> {
    let count = steps.len();
    steps.into_iter().enumerate().for_each(|(token, step)| ring.add(token, step));
    let mut all = Vec::new();
    while all.len() < count {
        ring.begin();
        match ring.next_done() {
            Some(done) => all.push(done),
            None => std::thread::yield_now(),
        }
    }
    all.sort_by_key(|done| done.token);
    all
}

/// Checks the image after these steps. Before them, it must have been filled with sevens.
fn assert_done(file: &File, done: &[Done]) {
    for Done { token, step, result } in done {
        assert!(result.is_ok(), "step {token}: {result:?}");
        if let Step::Read(_, buffer) = step {
            assert!(buffer.bytes().iter().all(|byte| *byte == 7));
        }
    }
    let mut bytes = vec![0; IMAGE_BYTES as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let expected = |at: u64| match at {
        _ if at < MIB => 1,
        _ if (2 * MIB + 512..4 * MIB + 512).contains(&at) || (5 * MIB..7 * MIB).contains(&at) => 0,
        _ => 7,
    };
    let mismatch = bytes.iter().zip(0..).find(|(byte, at)| **byte != expected(*at));
    assert_eq!(mismatch, None, "byte and place");
}

#[test]
fn ring_executes_steps_of_all_kinds() {
    let (file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    file.write_all_at(&vec![7; IMAGE_BYTES as usize], 0).unwrap();
    let done = carry_out(&mut ring, steps());
    assert_done(&file, &done);
    assert!(!ring.is_given_up());
}

/// Replaces the descriptor of the ring, so that every later system call on the ring fails.
fn break_ring(ring: &Uring) {
    let null = File::open("/dev/null").unwrap();
    // SAFETY: both descriptors are open. The ring's memory remains mapped, and the kernel no longer
    // reads it.
    assert!(unsafe { libc::dup2(null.as_raw_fd(), ring.as_raw_fd()) } >= 0);
}

#[test]
fn steps_are_executed_by_calls_after_the_ring_fails() {
    let (file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    file.write_all_at(&vec![7; IMAGE_BYTES as usize], 0).unwrap();
    break_ring(&ring);
    let done = carry_out(&mut ring, steps());
    assert!(ring.is_given_up());
    assert_done(&file, &done);
    // Later steps are also executed by blocking calls.
    let done = carry_out(&mut ring, vec![Step::Write(0, buffer(512, 3)), Step::Flush]);
    assert!(done.iter().all(|done| done.result.is_ok()));
}

#[test]
fn refused_step_fails_alone() {
    let (file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    file.write_all_at(&vec![7; IMAGE_BYTES as usize], 0).unwrap();
    fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    let refused: Vec<_> = carry_out(&mut ring, steps())
        .into_iter()
        .map(|done| done.result.err()?.raw_os_error())
        .collect();
    let eperm = Some(libc::EPERM);
    assert_eq!(refused, [eperm, None, eperm, eperm, eperm, None]);
}

#[test]
fn read_beyond_a_truncated_file_is_an_error() {
    let (file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    file.set_len(MIB / 2).unwrap();
    let done =
        carry_out(&mut ring, vec![Step::Read(0, buffer(MIB, 9)), Step::Read(MIB, buffer(512, 9))]);
    let kinds: Vec<_> = done.iter().map(|done| done.result.as_ref().unwrap_err().kind()).collect();
    assert_eq!(kinds, [io::ErrorKind::UnexpectedEof; 2]);
}

#[test]
fn draining_returns_the_results_of_all_steps() {
    let (file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    for _ in 0..50 {
        for (token, byte) in (0..8).zip(1..) {
            ring.add(token, Step::Write(token as u64 * MIB, buffer(MIB, byte)));
        }
        ring.begin();
        ring.add(8, Step::Flush);
        let mut done = ring.drain();
        done.sort_by_key(|done| done.token);
        assert_eq!(done.len(), 9);
        assert!(done.iter().all(|done| done.result.is_ok()));
        assert!(ring.drain().is_empty());
    }
    let mut bytes = vec![0; IMAGE_BYTES as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(
        bytes.chunks(MIB as usize).zip(1..).all(|(chunk, byte)| chunk.iter().all(|b| *b == byte))
    );
}

impl Uring {
    /// Replaces the results of the next `interruptions` flushes with EINTR.
    pub(super) fn interrupted(
        &mut self,
        mut completed: Vec<(usize, Running, i32)>,
    ) -> Vec<(usize, Running, i32)> {
        for (_, running, result) in &mut completed {
            if self.interruptions > 0 && matches!(running.step, Step::Flush) {
                self.interruptions -= 1;
                *result = -libc::EINTR;
            }
        }
        completed
    }
}

#[test]
fn interrupted_flush_has_its_own_result_after_draining() {
    let (_file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    for interruptions in [1, RETRIES_MAX - 1] {
        ring.interruptions = interruptions;
        ring.add(0, Step::Flush);
        let done = ring.drain();
        assert!(done.len() == 1 && done[0].result.is_ok());
        assert_eq!(ring.interruptions, 0);
    }
}

#[test]
fn interrupted_flush_is_repeated_by_a_call_if_the_ring_fails_during_draining() {
    let (_file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    ring.add(0, Step::Flush);
    ring.begin();
    while ring.ring.completion().is_empty() {
        std::thread::yield_now();
    }
    ring.interruptions = 1;
    break_ring(&ring);
    let done = ring.drain();
    assert!(ring.is_given_up() && ring.interruptions == 0);
    assert!(done.len() == 1 && done[0].result.is_ok());
}

#[test]
fn draining_has_a_result_for_each_flush_that_the_ring_did_not_take() {
    let (_file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    break_ring(&ring);
    (0..3).for_each(|token| ring.add(token, Step::Flush));
    ring.add(3, Step::Write(0, buffer(512, 1)));
    let done = ring.drain();
    assert!(ring.is_given_up());
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(done.iter().all(|done| done.result.is_ok()));
    assert!(ring.drain().is_empty());
}

fn outcome(running: &mut Running, result: i32) -> Option<Result<(), io::ErrorKind>> {
    running.advance(result).map(|result| result.map_err(|err| err.kind()))
}

#[test]
fn partial_transfer_is_continued() {
    for step in [Step::Write(0, buffer(4096, 1)), Step::Read(0, buffer(4096, 1))] {
        let mut running = Running::new(step, false);
        for (result, done) in [(512, 512), (-libc::EAGAIN, 512), (1, 513), (-libc::EINTR, 513)] {
            assert_eq!((outcome(&mut running, result), running.done), (None, done));
        }
        assert_eq!(outcome(&mut running, 4096 - 513), Some(Ok(())));
    }
    let mut none_left = Running::new(Step::Write(0, buffer(4096, 1)), false);
    assert_eq!(outcome(&mut none_left, 512), None);
    assert_eq!(outcome(&mut none_left, 0), Some(Err(io::ErrorKind::WriteZero)));
    let mut full = Running::new(Step::Write(0, buffer(4096, 1)), false);
    assert_eq!(outcome(&mut full, 512), None);
    assert_eq!(outcome(&mut full, -libc::ENOSPC), Some(Err(io::ErrorKind::StorageFull)));
}

#[test]
fn failed_flush_is_always_an_error() {
    for error in [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EOPNOTSUPP, libc::EINVAL] {
        let result = Running::new(Step::Flush, false).advance(-error).unwrap();
        assert_eq!(result.unwrap_err().raw_os_error(), Some(error));
    }
}

#[test]
fn zeroing_tries_three_methods_and_discard_is_a_hint() {
    let no = -libc::EOPNOTSUPP;
    let mut zeros = Running::new(Step::WriteZeroes(DiskRange::at(0, 4096), Unmap::Allowed), true);
    for method in [ZeroMethod::Punch, ZeroMethod::Zero] {
        assert_eq!(zeros.method, method);
        assert_eq!(outcome(&mut zeros, no), None);
    }
    assert_eq!(zeros.method, ZeroMethod::Write);
    assert_eq!(outcome(&mut zeros, 512), None);
    assert_eq!(outcome(&mut zeros, 4096 - 512), Some(Ok(())));
    let mut zeros =
        Running::new(Step::WriteZeroes(DiskRange::at(0, 4096), Unmap::Forbidden), false);
    assert_eq!(zeros.method, ZeroMethod::Zero);
    assert_eq!(outcome(&mut zeros, 0), Some(Ok(())), "fallocate returns 0 for the whole range");
    let mut zeros = Running::new(Step::WriteZeroes(DiskRange::at(0, 4096), Unmap::Allowed), true);
    assert_eq!(outcome(&mut zeros, -libc::ENOSPC), Some(Err(io::ErrorKind::StorageFull)));
    assert_eq!(
        outcome(&mut Running::new(Step::Discard(DiskRange::at(0, 512)), false), no),
        Some(Ok(()))
    );
    let refused =
        outcome(&mut Running::new(Step::Discard(DiskRange::at(0, 512)), false), -libc::EPERM);
    assert_eq!(refused, Some(Err(io::ErrorKind::PermissionDenied)));
}

#[test]
fn step_that_is_deferred_too_often_fails() {
    let mut running = Running::new(Step::Flush, false);
    let times = (0..10_000).find(|_| running.advance(-libc::EAGAIN).is_some());
    assert_eq!(times, Some(RETRIES_MAX - 1));
}

#[test]
fn ring_does_not_wait_for_a_range_that_another_step_changes() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("image");
    File::create(&path).unwrap().set_len(IMAGE_BYTES).unwrap();
    let options = ImageOptions { direct: true, sparse: true, ..ImageOptions::default() };
    let Ok(image) = RawImage::open(&path, options) else {
        return eprintln!("skipped: the file system does not support O_DIRECT");
    };
    let Some(mut ring) = ring(&image) else { return };
    let locked = image.lock_unaligned(0, 512).expect("an image with O_DIRECT has locks");
    ring.add(0, Step::Write(4096, buffer(4096, 7)));
    assert!(!ring.begin() && !ring.arm());
    assert!(ring.next_done().is_none(), "the step was not deferred");
    drop(locked);
    assert!(ring.event.read().is_ok(), "the release did not raise the ring's event");
    assert!(ring.arm());
    let done = ring.next_done().expect("a completed step");
    assert!(done.token == 0 && done.result.is_ok());
    assert_eq!(std::fs::read(&path).unwrap()[4096..8192], [7; 4096]);
}

#[test]
fn ring_accepts_only_transfers_of_its_image() {
    let (_file, image) = image();
    let Some(mut uring) = ring(&image) else { return };
    let mut bytes = [0_u8; 16];
    let other = File::open("/proc/self/status").unwrap();
    let (at, len) = (bytes.as_mut_ptr(), bytes.len() as u32);
    let entries = [
        opcode::Nop::new().build(),
        opcode::Close::new(types::Fd(other.as_raw_fd())).build(),
        opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), c"/etc/passwd".as_ptr()).build(),
        opcode::Read::new(types::Fd(other.as_raw_fd()), at, len).build(),
        opcode::Read::new(IMAGE, at, len).build().flags(squeue::Flags::ASYNC),
    ];
    for entry in entries {
        let name = format!("{entry:?}");
        // SAFETY: the buffer and the path outlive the entry, because its completion is awaited.
        unsafe { uring.ring.submission().push(&entry) }.unwrap();
        uring.ring.submit_and_wait(1).unwrap();
        let completion = uring.ring.completion().next().unwrap();
        assert_eq!(completion.result(), -libc::EACCES, "{name}");
    }
    let entry = opcode::Read::new(IMAGE, at, len).build();
    // SAFETY: as above.
    unsafe { uring.ring.submission().push(&entry) }.unwrap();
    uring.ring.submit_and_wait(1).unwrap();
    assert_eq!(uring.ring.completion().next().unwrap().result(), 16);
    // Another file cannot take the place of the image.
    let submitter = uring.ring.submitter();
    let refused = |result: io::Result<_>| result.unwrap_err().raw_os_error() == Some(libc::EACCES);
    assert!(refused(submitter.register_files_update(0, &[other.as_raw_fd()]).map(drop)));
    submitter.unregister_files().unwrap();
    assert!(refused(submitter.register_files(&[other.as_raw_fd()])));
}

#[test]
fn dropped_ring_has_released_its_image() {
    let (file, image) = image();
    let Some(mut ring) = ring(&image) else { return };
    carry_out(&mut ring, vec![Step::Flush]);
    drop((ring, image));
    let flags = FlockOperation::NonBlockingLockExclusive;
    // The kernel grants a lock that conflicts with the image's only after its last close.
    flock(File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap(), flags).unwrap();
}
