//! Resource usage of a process, from /proc.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_tests::wait_until;

/// Duration of the measurement that shows whether a VMM is at rest.
const IDLE_WINDOW: Duration = Duration::from_secs(1);
/// CPU share below which a process counts as being at rest. In an emulated guest, the clock and
/// agents use a few percent.
const IDLE_SHARE: f64 = 0.1;
const IDLE_LIMIT: Duration = Duration::from_secs(120);

/// Waits until the process, including its guest, is nearly idle.
pub(crate) fn wait_until_idle(pid: u32) -> Result<()> {
    let mut since = (Instant::now(), cpu_time(pid)?);
    wait_until("the guest is at rest", IDLE_LIMIT, || {
        let elapsed = since.0.elapsed();
        if elapsed < IDLE_WINDOW {
            return Ok(false);
        }
        let now = cpu_time(pid)?;
        let share = (now - since.1).as_secs_f64() / elapsed.as_secs_f64();
        since = (Instant::now(), now);
        Ok(share < IDLE_SHARE)
    })
}

/// Returns the user and system time of all threads of a process. A vCPU's guest time counts as user
/// time (proc(5)).
fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("Cannot read {path}"))?;
    // The name in parentheses may contain any character.
    let (_, fields) = text.rsplit_once(") ").context("Stat line without a name")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    // utime and stime are fields 14 and 15 of the line. The first field here is field 3.
    let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    // SAFETY: the call takes no pointers.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// Memory of a VMM process in bytes, without the memory of its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VmmMemory {
    /// Proportional set size. Shared pages count in proportion to the number of their users.
    pub pss: u64,
    /// Anonymous memory: heap, stacks and modified private data.
    pub anonymous: u64,
}

/// Adds up the mappings of a process, except the guest's boot memory. The boot memory is recognized
/// by its size, so no other guest memory may be plugged.
pub(crate) fn vmm_memory(pid: u32, guest_bytes: u64) -> Result<VmmMemory> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| format!("Cannot read {path}"))?;
    sum_vmm_memory(&text, guest_bytes)
}

fn sum_vmm_memory(smaps: &str, guest_bytes: u64) -> Result<VmmMemory> {
    let mut sum = VmmMemory { pss: 0, anonymous: 0 };
    let (mut is_guest, mut guests) = (false, 0);
    for line in smaps.lines() {
        let Some((field, value)) = line.split_once(':') else { continue };
        let Some(kib) = value.trim().strip_suffix(" kB") else { continue };
        let bytes =
            kib.trim().parse::<u64>().with_context(|| format!("Not a line of smaps: {line:?}"))?
                * 1024;
        match field {
            // The first field of each mapping.
            "Size" => {
                is_guest = bytes == guest_bytes;
                guests += u32::from(is_guest);
            }
            "Pss" if !is_guest => sum.pss += bytes,
            "Anonymous" if !is_guest => sum.anonymous += bytes,
            _ => {}
        }
    }
    ensure!(
        guests == 1,
        "{guests} mappings instead of 1 have the size of the guest's memory, {guest_bytes} bytes"
    );
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00500000 r-xp 00000000 08:01 1 /usr/bin/vmm
Size:               1024 kB
Rss:                 800 kB
Pss:                 700 kB
Anonymous:             0 kB
7f0000000000-7f0020000000 rw-p 00000000 00:00 0
Size:             524288 kB
Rss:               99999 kB
Pss:               99999 kB
Anonymous:         99999 kB
7f0020000000-7f0020100000 rw-p 00000000 00:00 0 [heap]
Size:               1024 kB
Pss:                 300 kB
Anonymous:           300 kB
VmFlags: rd wr mr mw me ac sd
";

    #[test]
    fn guest_memory_is_excluded() {
        let sum = sum_vmm_memory(SMAPS, 512 << 20).unwrap();
        assert_eq!(sum, VmmMemory { pss: 1000 << 10, anonymous: 300 << 10 });
        assert!(sum_vmm_memory(SMAPS, 256 << 20).is_err(), "the guest's memory was not found");
    }

    #[test]
    fn cpu_time_of_this_process_grows() {
        assert!(cpu_time(std::process::id()).is_ok());
        assert!(cpu_time(u32::MAX).is_err());
    }
}
