//! Tests that images of the guests and of the emulated host do not depend on settings and programs
//! of the user or the machine.
//!
//! Two copies of the wrapper scripts build images, one with plain settings and one with hostile
//! ones.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, ensure};

use super::tree::{Tree, debs, is_skipped, missing_tool, repository};

const BUILDS: [&str; 3] = ["ci/setup", "guest/image/build basic-6.12", "ci/xtask/run host-disk"];
const SCRIPTS: [&str; 4] =
    ["ci/nested/init", "ci/nested/root-init", "guest/image/init", "guest/image/acpi-power"];
/// Source file that names the packages for the images.
const PACKAGES: &str = "ci/xtask/src/images/trees.rs";
/// Source files that the images depend on, among others.
const CODE: [&str; 3] = [PACKAGES, "ci/xtask/src/programs.rs", "ci/xtask/Cargo.toml"];
const OUR_PROGRAMS: [&str; 3] = ["foreshore-agent", "guest-shell", "guest-tool"];
/// Image programs that come from Debian packages. In this test, each is a copy of the machine's
/// mke2fs.
const PACKAGED_PROGRAMS: [&str; 10] = [
    "sbin/mke2fs",
    "sbin/mkfs.ext4",
    "sbin/e2fsck",
    "sbin/fsck.ext4",
    "sbin/resize2fs",
    "sbin/mkfs.xfs",
    "bin/bash",
    "bin/cp",
    "usr/bin/curl",
    "usr/bin/jq",
];
/// Package that contains the files of all packages in this test.
const LIBC6: &str = "target/ci/packages/libc6";
const LOADER: &str = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
/// Programs that come first in a hostile user's PATH.
const STAND_INS: &str = "awk basename busybox cat chmod cp cpio cut depmod dpkg du find flock grep install ln lz4 \
                         mkdir mke2fs modprobe mv rm sed sha256sum sort stat strip tar xargs xz";
const STAND_IN: &str = "#!/bin/sh\necho a stand-in\n";
const FILE_SYSTEM_CONFIG: &str = "[defaults]\n base_features = sparse_super\n blocksize = 1024\n inode_size = 128\n\
                                  [fs_types]\n ext4 = {\n  features = ^extent\n }\n";
/// Mounts hostile files over /run, for kmod's configuration, and over /etc/mke2fs.conf.
const IN_NAMESPACE: &str = "mount --bind hostile/run /run && mount --bind hostile/mke2fs.conf /etc/mke2fs.conf && exec \"$@\"";
/// Lists the files of all images with modes, owners and contents, and the properties of the disk.
/// The content of the guest image on the disk is ignored, because it has time stamps. debugfs fails
/// if it may not set an owner.
const LIST: &str = r#"set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
disk=$PWD/target/ci/host/root.ext4
mkdir -p listed/guest listed/initrd listed/disk
lz4 -dc target/ci/guests/basic-6.12.img >listed/guest.cpio
cp target/ci/host/initrd listed/initrd.cpio
cd listed
for image in guest initrd; do
    cpio --quiet -itvn <$image.cpio | awk "{ print \"$image\", \$1, \$3, \$4, \$5, \$9, \$11 }"
    (cd $image && cpio --quiet -id <../$image.cpio)
done
debugfs -R "rdump / disk" "$disk" 2>/dev/null || true
find disk -printf '%p %M %l\n'
find guest initrd disk -type f ! -name '*.img' -exec sha256sum {} +
dumpe2fs -h "$disk" 2>/dev/null |
    grep -E '^(Filesystem features|Reserved block count|(Block|Inode) (size|count)):'
"#;

/// Settings of the user and of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Settings {
    Plain,
    /// Hostile umask, variables and programs of the user.
    User,
    /// Same as `User`, and hostile modprobe.d, depmod.d and mke2fs.conf files that only root can
    /// write.
    Machine,
}

/// Returns a lock file with one kernel. Returns `None` if something is missing that `ci/setup`
/// would fetch or install.
pub(crate) fn kernel_lock() -> Option<String> {
    let lock = fs::read_to_string(repository().join("ci/kernels.lock")).unwrap();
    let line = lock.lines().find(|line| line.starts_with("6.12 ")).unwrap();
    let words: Vec<_> = line.split(' ').collect();
    let file = format!("{}_{}_amd64.deb", words[1], words[2].replace(':', "%3a"));
    let missing = Some(debs().join(file)).filter(|file| !file.exists());
    let missing = missing.map(|file| file.display().to_string());
    (!is_skipped(missing.or(missing_tool().map(str::to_owned)))).then(|| format!("{line}\n"))
}

/// Returns a tree in which images can be built.
pub(crate) fn builder(kernel_lock: &str, umask: u32) -> Result<Tree> {
    // /tmp is not used, because it may be in memory.
    let tree = Tree::new(Path::new(env!("CARGO_TARGET_TMPDIR")), umask, ":")?;
    SCRIPTS.iter().try_for_each(|script| tree.copy_script(script))?;
    tree.write("ci/kernels.lock", kernel_lock, 0o644 & !umask)?;
    for file in CODE {
        tree.copy(&repository().join(file), file, 0o644 & !umask)?;
    }
    for program in OUR_PROGRAMS {
        let path = format!("target/x86_64-unknown-linux-gnu/guest-tests/{program}");
        tree.copy(Path::new("/usr/bin/env"), &path, 0o755 & !umask)?;
    }
    add_packages(&tree)?;
    add_hostile_files(&tree)?;
    Ok(tree)
}

/// Adds unpacked packages as a download would leave them, with a folder for each word in the
/// source.
fn add_packages(tree: &Tree) -> Result<()> {
    let code = fs::read_to_string(tree.path(PACKAGES))?;
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
    for name in code.split(|letter| !is_part(letter)) {
        fs::create_dir_all(tree.path("target/ci/packages").join(name))?;
    }
    tree.copy(&Path::new("/").join(LOADER), &format!("{LIBC6}/{LOADER}"), 0o755)?;
    let listed = output("ldd", Command::new("ldd").arg("/sbin/mke2fs"))?;
    for (_, rest) in listed.lines().filter_map(|line| line.split_once(" => ")) {
        let library = rest.split(' ').next().context("no path")?;
        let name = library.rsplit('/').next().context("no name")?;
        tree.copy(library.as_ref(), &format!("{LIBC6}/lib/x86_64-linux-gnu/{name}"), 0o644)?;
    }
    PACKAGED_PROGRAMS.iter().try_for_each(|program| {
        tree.copy(Path::new("/sbin/mke2fs"), &format!("{LIBC6}/{program}"), 0o755)
    })
}

fn add_hostile_files(tree: &Tree) -> Result<()> {
    for program in STAND_INS.split(' ') {
        tree.write(&format!("hostile/bin/{program}"), STAND_IN, 0o755)?;
    }
    fs::create_dir_all(tree.path("hostile/cdpath/ci/xtask"))?;
    tree.write("hostile/busybox/busybox", STAND_IN, 0o755)?;
    for dir in ["hostile/modprobe.d", "hostile/run/modprobe.d"] {
        tree.write(&format!("{dir}/ndctl.conf"), "install libnvdimm /bin/true\n", 0o644)?;
    }
    tree.write("hostile/run/depmod.d/other.conf", "exclude kernel\n", 0o644)?;
    tree.write("hostile/mke2fs.conf", FILE_SYSTEM_CONFIG, 0o644)
}

fn output(description: &str, command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{description}: {}: {text}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

fn command(tree: &Tree, settings: Settings, line: &str) -> Result<Command> {
    let is_hostile = settings != Settings::Plain;
    let umask = if is_hostile { "077" } else { "022" };
    let is_machine = settings == Settings::Machine;
    let mut command = Command::new(if is_machine { "unshare" } else { "bash" });
    if is_machine {
        command.args(["-m", "bash", "-c", IN_NAMESPACE, "bash", "bash"]);
    }
    // The user's PATH applies only to the script, because the commands above should be the
    // machine's. env keeps the script's name relative, which tests CDPATH.
    let hostile = |path: &str| tree.path("hostile").join(path).display().to_string();
    let mut path = tree.user_path()?;
    if is_hostile {
        // The user's busybox is in a separate folder.
        path = format!("{}:{}:{path}", hostile("busybox"), hostile("bin"));
    }
    command.args(["-c", "umask $0; PATH=$1; shift; exec env \"$@\"", umask, &path]);
    command.args(line.split(' ')).current_dir(tree.folder()).env("FORESHORE_DEB_CACHE", debs());
    let settings = [
        ("CDPATH", hostile("cdpath")),
        // Function that bash has exported.
        ("BASH_FUNC_cp%%", "() { :; }".to_owned()),
        ("MODPROBE_OPTIONS", format!("--config={}", hostile("modprobe.d"))),
        ("LANG", "de_DE.UTF-8".to_owned()),
        ("LC_ALL", "de_DE.UTF-8".to_owned()),
        ("MKE2FS_CONFIG", hostile("mke2fs.conf")),
    ];
    for (name, value) in settings {
        if is_hostile {
            command.env(name, value)
        } else {
            command.env_remove(name)
        };
    }
    Ok(command)
}

/// Builds the images and lists their files.
fn build(tree: &Tree, settings: Settings) -> Result<BTreeSet<String>> {
    for line in BUILDS {
        output(line, &mut command(tree, settings, line)?)?;
    }
    let listed = output("list", Command::new("sh").args(["-c", LIST]).current_dir(tree.folder()))?;
    // A kmod configuration of this machine may itself replace the module with a command.
    for part in ["guest/lib/modules", "/libnvdimm.ko", " disk/sbin/init\n", "\nBlock size:"] {
        ensure!(listed.contains(part), "no {part}");
    }
    Ok(listed.lines().map(str::to_owned).collect())
}

#[test]
fn images_depend_on_no_setting_of_user_or_machine() {
    let Some(lock) = kernel_lock() else { return };
    let mut mount = Command::new("unshare");
    let can_mount = output("mount", mount.args(["-m", "test", "-f", "/etc/mke2fs.conf"])).is_ok();
    if !can_mount {
        eprintln!(
            "skipped: nothing can be mounted here (it needs root), so files of the machine stay"
        );
    }
    let hostile = if can_mount { Settings::Machine } else { Settings::User };
    let build = |umask, settings| build(&builder(&lock, umask)?, settings);
    let (plain, changed) = thread::scope(|scope| {
        let plain = scope.spawn(|| build(0o022, Settings::Plain));
        let changed = build(0o077, hostile);
        (plain.join().unwrap().unwrap(), changed.unwrap())
    });
    let differences: Vec<_> = plain.symmetric_difference(&changed).collect();
    assert!(differences.is_empty(), "{differences:#?}");
}
