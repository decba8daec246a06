//! Runs the commands in the section "Use it" of README.md.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::{wait_for, wait_until};

guest_tests::tests![the_commands_under_use_it_run];

const README: &str = include_str!("../../../../../README.md");
const LIMIT: Duration = Duration::from_secs(60);
/// Path of the pool that the commands create.
const POOL: &str = "/dev/shm/pool";
const OTHER_TERMINAL: &str = "# It stays in the foreground.";

/// Returns the commands without the lines that depend on where the repository was cloned: the
/// build, and the paths of the programs, the kernel and the image.
fn commands() -> Result<(String, String)> {
    let (_, section) =
        README.split_once("\n## Use it\n").context("README.md has no section Use it")?;
    let section = section.split("\n## ").next().unwrap_or(section);
    let block = section.lines().skip_while(|line| !line.starts_with("    "));
    let block =
        block.take_while(|line| line.is_empty() || line.starts_with("    ")).map(str::trim_start);
    let of_clone = |line: &&str| {
        ["cargo build", "PATH=", "kernel=", "initramfs="]
            .iter()
            .any(|start| line.starts_with(start))
    };
    let lines: Vec<&str> = block.collect();
    ensure!(
        lines.iter().filter(|line| of_clone(line)).count() == 4,
        "The section does not have the expected four lines: {lines:#?}"
    );
    let text = lines.into_iter().filter(|line| !of_clone(line)).collect::<Vec<_>>().join("\n");
    let (first, second) = text
        .split_once(OTHER_TERMINAL)
        .context("The section has no commands for another terminal")?;
    Ok((first.to_owned(), second.lines().skip(1).collect::<Vec<_>>().join("\n")))
}

struct Terminal(Child);

impl Terminal {
    fn open(commands: &str, output: &Path) -> Result<Self> {
        let guests = std::env::var("GUESTS").unwrap_or_else(|_| "/guests".to_owned());
        let file =
            File::create(output).with_context(|| format!("Cannot create {}", output.display()))?;
        // The emulated host has busybox' wget but not curl.
        let script = format!(
            "set -e\ncommand -v curl >/dev/null || curl() {{ wget -q -O - \"$2\"; }}\n{commands}"
        );
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).env("kernel", format!("{guests}/vmlinuz-6.12"));
        shell.env("initramfs", format!("{guests}/basic-6.12.img")).stdin(Stdio::null());
        shell.stdout(file.try_clone()?).stderr(file);
        Ok(Terminal(shell.spawn().context("Cannot start sh")?))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The VMM is a child of the shell, and a call of its API has ended it. The VMM does not
        // exist if the shell failed earlier.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn the_commands_under_use_it_run() -> Result<()> {
    let dir = this_tests_dir();
    fs::create_dir_all(&dir)?;
    let (first, second) = commands()?;
    let console = dir.join("first.log");
    let mut vmm = Terminal::open(&first, &console)?;
    let ready = || Ok(fs::read_to_string(&console)?.contains("foreshore-guest: ready"));
    let checked = wait_until("the guest is ready", LIMIT, ready).and_then(|()| {
        let output = dir.join("second.log");
        let status = Terminal::open(&second, &output)?.0.wait()?;
        let stdout = fs::read_to_string(&output)?;
        ensure!(status.success(), "The other terminal's commands ended with {status}: {stdout}");
        for word in ["REQUESTED", "foreshore_memory_plugged_bytes"] {
            ensure!(stdout.contains(word), "{word} is missing in: {stdout}");
        }
        Ok(())
    });
    let checked = checked.with_context(|| fs::read_to_string(&console).unwrap_or_default());
    let _ = Command::new("foreshore-remote")
        .args(["--api-socket", "/run/vm.sock", "shutdown-vmm"])
        .status();
    let status = wait_for("the VMM has ended", LIMIT, || Ok(vmm.0.try_wait()?));
    fs::remove_file(POOL)?;
    checked?;
    ensure!(status?.success(), "The commands failed: {}", fs::read_to_string(&console)?);
    Ok(())
}
