//! Command lines that the program refuses. The error is one line with the flag, the value and the
//! bound, and nothing is created or changed. The parser refuses them, so KVM is not needed.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use pmem_volume::{Pool, VolumeFormat, VolumeSize};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// Exit code for a refused command line, the same as for clap and Cloud Hypervisor.
const WRONG_COMMAND_LINE: i32 = 2;

/// Folder that contains a file of 4 MiB, and a pool with the volume `data`.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(TempDir::new().unwrap());
        let pool = Pool::create(Path::new(&files.path("pool")), 64 * MIB, 0).unwrap();
        pool.create_volume("data", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
        File::create(files.path("file")).unwrap().set_len(4 * MIB).unwrap();
        files
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Names and contents of the files in the folder.
    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap());
        let content = |entry: &fs::DirEntry| fs::read(entry.path()).unwrap();
        let mut found: Vec<_> = entries
            .map(|entry| (entry.file_name().into_string().unwrap(), content(&entry)))
            .collect();
        found.sort();
        found
    }
}

/// Returns the only output line of a VMM that refuses its flags.
fn refusal(folder: &Path, flags: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore"));
    let output = command.current_dir(folder).args(flags).output().expect("the VMM starts");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(WRONG_COMMAND_LINE), "{flags:?}: {message}");
    assert_eq!(message.lines().count(), 1, "{flags:?}: {message}");
    assert!(output.stdout.is_empty(), "{flags:?}");
    message
}

/// Checks that each command line is refused with an error that contains the flag and the words, and
/// that no file changes.
fn refused(files: &Files, cases: &[(&[&str], &[&str])]) {
    let before = files.contents();
    for (flags, words) in cases {
        let kernel: &[&str] = if flags.contains(&"--firmware") { &[] } else { &["--kernel", "/k"] };
        let message = refusal(files.0.path(), &[kernel, flags].concat());
        for word in words.iter().chain(&flags[..1]) {
            assert!(message.contains(word), "nothing of {word:?} in: {message}");
        }
    }
    assert!(before == files.contents(), "a refusal has changed a file");
}

#[test]
fn sizes_out_of_bounds_are_refused() {
    let files = Files::new();
    refused(
        &files,
        &[
            (&["--memory", "size=0"], &["size is 0", "at least 4 KiB"]),
            (&["--memory", "size=4097"], &["4097", "4 KiB"]),
            (&["--memory", "size=8192T"], &["8192 TiB", "4096 TiB"]),
            (&["--memory", "size=plenty"], &["size", "plenty"]),
            (
                &["--memory", "size=512M,hotplug_method=virtio-mem,hotplug_size=3M"],
                &["hotplug_size", "3 MiB", "2 MiB"],
            ),
            (
                &["--memory", "size=384M,hotplug_size=1G,hotplugged_size=128M"],
                &["hotplugged_size is 128 MiB", "virtio-mem"],
            ),
            (&["--pm-memory", "pool=pool,size=0"], &["size is 0"]),
            (&["--pm-memory", "pool=pool,size=3M"], &["3 MiB", "2 MiB"]),
            (&["--pm-memory", "pool=pool,size=8192T"], &["8192 TiB", "4096 TiB"]),
            (&["--pm-volume", "pool=pool,name=a,create=on,size=0"], &["size is 0"]),
            (&["--pm-volume", "pool=pool,name=a,create=on,size=3M"], &["3 MiB", "2 MiB"]),
            (&["--pm-volume", "pool=pool,name=a,create=on,size=8192T"], &["8192 TiB", "4096 TiB"]),
            (&["--pmem", "file=file,size=3M"], &["3 MiB", "2 MiB"]),
        ],
    );
}

#[test]
fn unknown_keys_words_and_missing_keys_are_refused() {
    let files = Files::new();
    refused(
        &files,
        &[
            (&["--memory", "size=512M,colour=red"], &["unknown key", "colour"]),
            (&["--memory", "sise=1G"], &["\"sise\" (did you mean 'size='?); the keys are size="]),
            (&["--console", "ptty"], &["\"ptty\" (did you mean 'pty'?)"]),
            (&["--cpus", "boot=1,bot=2"], &["did you mean 'boot='?"]),
            (&["--pressure", "policy=psi,horizn=3s"], &["did you mean 'horizon='?"]),
            (&["--pressure", "policy=daper"], &["did you mean 'dapper'?"]),
            (&["--seccomp", "ture"], &["true, false, log, errno] (did you mean 'true'?)"]),
            (&["--landlock", "ofd"], &["auto, on, off] (did you mean 'off'?)"]),
            (&["--memory", "hotplug_method=virtio-men"], &["did you mean 'virtio-mem'?"]),
            (&["--rng", "source=/dev/urandom"], &["unknown key", "source"]),
            (&["--pmem", "file=file,colour=red"], &["unknown key", "colour"]),
            (&["--pmem", "size=2M"], &["file= is missing"]),
            (&["--pressure", "policy=greedy"], &["greedy", "psi"]),
            (
                &["--pm-volume", "pool=pool,name=data,format=qcow2"],
                &["format", "qcow2", "btt or raw"],
            ),
        ],
    );
}

#[test]
fn unsupported_and_duplicate_devices_are_refused() {
    let files = Files::new();
    refused(
        &files,
        &[
            (&["--disk", "path=file,num_queues=2"], &["num_queues is 2, and must be 1"]),
            (&["--disk", "path=file,vhost_user=on"], &["vhost-user is not implemented"]),
            (&["--net", "num_queues=4"], &["num_queues is 4"]),
            (&["--net", "vhost_user=on"], &["vhost-user is not implemented"]),
            (&["--net", "fd=1000"], &["fd=1000 is not open"]),
            (&["--pmem", "file=file,iommu=on"], &["iommu=on", "not supported"]),
            (&["--pmem", "file=file,pci_segment=1"], &["pci_segment=1", "not supported"]),
            (
                &[
                    "--pm-volume",
                    "pool=pool,name=data,interface=virtio-pmem",
                    "--cpus",
                    "boot=1,max=2",
                ],
                &["virtio-pmem", "max=2"],
            ),
            (&["--firmware", "file", "--kernel", "/k"], &["--kernel"]),
        ],
    );
}

#[test]
fn duplicate_files_and_volumes_are_refused() {
    let files = Files::new();
    std::os::unix::fs::symlink("file", files.path("link")).unwrap();
    let other_spelling = format!("pool={},name=data", files.path("./pool"));
    let spelling = format!("pool={},name=data", files.path("pool"));
    let other_uses: Vec<_> = ["nvdimm", "virtio-blk", "virtio-pmem"]
        .iter()
        .flat_map(|interface| {
            [&spelling, &other_spelling].map(|volume| format!("{volume},interface={interface}"))
        })
        .collect();
    let flags: Vec<_> =
        other_uses.iter().map(|other| ["--pm-volume", &spelling, "--pm-volume", other]).collect();
    let cases: Vec<(&[&str], &[&str])> =
        flags.iter().map(|flags| (&flags[..], &["volume data", "is given twice"][..])).collect();
    refused(&files, &cases);
    refused(
        &files,
        &[
            (&["--pmem", "file=file", "--pmem", "file=file"], &["name the same file"]),
            (
                &["--pmem", "file=file", "--disk", "path=link"],
                &["--disk", "link", "name the same file"],
            ),
        ],
    );
}
