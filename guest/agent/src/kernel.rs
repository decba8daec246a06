//! Version and preemption model of the guest's kernel.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use foreshore_proto::{PROTOCOL_VERSION, RawHello};

/// Maximum length of strings. The VMM rejects longer ones.
const MAX_TEXT_CHARS: usize = 120;

pub(crate) fn hello() -> RawHello {
    let kernel = rustix::system::uname();
    let (release, version) =
        (kernel.release().to_string_lossy(), kernel.version().to_string_lossy());
    let is_line = |c: &char| c.is_ascii_graphic() || *c == ' ';
    RawHello {
        version: PROTOCOL_VERSION,
        agent_version: env!("CARGO_PKG_VERSION").into(),
        kernel_release: release
            .chars()
            .filter(char::is_ascii_graphic)
            .take(MAX_TEXT_CHARS)
            .collect(),
        kernel_version: version.chars().filter(is_line).take(MAX_TEXT_CHARS).collect(),
        preemption: preemption(&version, &Evidence::collect()).into(),
        page_size_bytes: rustix::param::page_size() as u64,
    }
}

/// Sources from which the preemption model can be found if the kernel supports several, in order of
/// preference.
#[derive(Debug, Default)]
struct Evidence {
    /// Content of /sys/kernel/debug/sched/preempt, with the selected model in parentheses. debugfs
    /// is not always mounted.
    scheduler: String,
    /// Kernel log. Linux logs a line "Dynamic Preempt: MODEL" at boot and at each change
    /// (kernel/sched/core.c). Later messages may have overwritten this line.
    log: String,
    /// Content of /proc/cmdline, with the model requested at boot.
    command_line: String,
}

impl Evidence {
    fn collect() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            scheduler: read("/sys/kernel/debug/sched/preempt"),
            log: kernel_log().unwrap_or_default(),
            command_line: read("/proc/cmdline"),
        }
    }

    fn model(&self) -> Option<&'static str> {
        const MODELS: [&str; 4] = ["none", "voluntary", "full", "lazy"];
        let known = |text: &str| MODELS.into_iter().find(|model| *model == text);
        let in_use =
            || MODELS.into_iter().find(|model| self.scheduler.contains(&format!("({model})")));
        let logged = || {
            let said = self.log.lines().filter_map(|line| line.split_once("Dynamic Preempt: "));
            said.filter_map(|(_, model)| known(model.trim())).next_back()
        };
        // The last model on the command line that the kernel knows is in effect
        // (setup_preempt_mode).
        let wanted = || {
            let words = self.command_line.split_whitespace();
            words.filter_map(|word| known(word.strip_prefix("preempt=")?)).next_back()
        };
        in_use().or_else(logged).or_else(wanted)
    }
}

/// Reads the relevant lines that are still in the kernel log. Each read returns one record
/// (Documentation/ABI/testing/dev-kmsg).
fn kernel_log() -> io::Result<String> {
    let mut log = String::new();
    let mut kmsg: File = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/kmsg")?;
    // Larger than a record. The loop makes more reads than a log of the usual size has records.
    let mut record = [0; 8192];
    for _ in 0..100_000 {
        match kmsg.read(&mut record) {
            Ok(len) => {
                // Only relevant lines are kept, because all lines would take megabytes.
                let text = String::from_utf8_lossy(&record[..len]);
                if text.contains("Dynamic Preempt: ") {
                    log += text.lines().next().unwrap_or_default();
                    log.push('\n');
                }
            }
            // The record was overwritten. The next read returns the oldest remaining one.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(log)
}

/// Returns the preemption model from `uname -v`, or from `evidence` if the model can be selected at
/// boot.
fn preemption(uname_version: &str, evidence: &Evidence) -> &'static str {
    let has = |flag: &str| uname_version.split_whitespace().any(|word| word == flag);
    if has("PREEMPT_RT") {
        "rt"
    } else if has("PREEMPT_DYNAMIC") {
        evidence.model().unwrap_or("dynamic")
    } else if has("PREEMPT") {
        "full"
    } else {
        "static"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn current_model_precedes_the_log_and_the_command_line() {
        const DEBIAN: &str = "#1 SMP PREEMPT_DYNAMIC Debian 6.12.117-1~deb12u1 (2026-11-14)";
        let log = "6,9,1,-;Dynamic Preempt: none\n6,99,2,-;Dynamic Preempt: voluntary\n";
        let wanted = "console=ttyS0 preempt=full preempt=none preempt=fast quiet";
        for (version, [scheduler, log, command_line], model) in [
            (DEBIAN, ["none (voluntary) full\n", "", ""], "voluntary"),
            (DEBIAN, ["none voluntary (full) lazy\n", log, wanted], "full"),
            // The last line in the log is used.
            (DEBIAN, ["", log, wanted], "voluntary"),
            // The last value on the command line that the kernel knows is used.
            (DEBIAN, ["", "6,9,1,-;Dynamic Preempt: sometimes\n", wanted], "none"),
            (DEBIAN, ["", "", "xpreempt=full preempt= PREEMPT=full"], "dynamic"),
            // Kernels with a fixed model name it in their version.
            ("#1 SMP PREEMPT_RT Debian", ["", "", "preempt=none"], "rt"),
            ("#7 SMP PREEMPT Mon", ["", "", "preempt=none"], "full"),
            ("#7 SMP Mon", ["", "", "preempt=none"], "static"),
        ] {
            let [scheduler, log, command_line] = [scheduler, log, command_line].map(str::to_owned);
            let evidence = Evidence { scheduler, log, command_line };
            assert_eq!(preemption(version, &evidence), model, "{version} {evidence:?}");
        }
    }

    #[test]
    fn our_own_hello_passes_verification() {
        let hello = foreshore_proto::Hello::try_from(hello()).expect("verifies");
        assert!(hello.kernel_release().contains('.') && !hello.kernel_version().is_empty());
    }
}
