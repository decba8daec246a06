//! The images of the guests and of the emulated host depend on no setting and no program of the user or the machine.
//!
//! Copies of the scripts build in directories of their own, once with plain and once with hostile settings. Other copies
//! lack one protection each, and must build something else or fail.
//!
//! The scripts find `bash` and `dirname` in PATH before ci/lib.sh can set it, so no stand-ins replace these.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

const KERNEL: &str = "6.12";
const SETUP: &str = "ci/setup";
const GUEST_SCRIPT: &str = "guest/image/build";
const GUEST: &str = "guest/image/build basic-6.12";
const HOST: &str = "ci/nested/build-root";
const LIB: &str = "ci/lib.sh";
const SCRIPTS: [&str; 8] = [
    LIB,
    SETUP,
    HOST,
    "ci/nested/init",
    "ci/nested/root-init",
    GUEST_SCRIPT,
    "guest/image/init",
    "guest/image/acpi-power",
];
const OUR_PROGRAMS: [&str; 3] = ["foreshore-agent", "guest-shell", "guest-tool"];
/// Programs of the images that come from Debian packages. Here each is the machine's mke2fs.
const PACKAGED_PROGRAMS: [&str; 6] = ["mke2fs", "mkfs.ext4", "e2fsck", "fsck.ext4", "resize2fs", "mkfs.xfs"];
/// Programs of the distribution that scripts or this test run.
const TOOLS: [&str; 9] = ["busybox", "cpio", "debugfs", "depmod", "dumpe2fs", "lz4", "mke2fs", "strip", "xz"];
const LOADER: &str = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
/// Programs that stand first in the PATH of a hostile user.
const STAND_INS: &str = "awk basename busybox cat chmod cp cpio cut depmod dpkg du find flock grep install ln lz4 \
                         mkdir mke2fs modprobe mv rm sed sha256sum sort stat strip tar xargs xz";
const STAND_IN: &str = "#!/bin/sh\necho a stand-in\n";
const FILE_SYSTEM_CONFIG: &str = "[defaults]\n base_features = sparse_super\n blocksize = 1024\n inode_size = 128\n\
                                  [fs_types]\n ext4 = {\n  features = ^extent\n }\n";
/// Takes the places of /run, for kmod's configuration, and of /etc/mke2fs.conf.
const IN_NAMESPACE: &str =
    "mount --bind hostile/run /run && mount --bind hostile/mke2fs.conf /etc/mke2fs.conf && exec \"$@\"";

/// Settings of a user or of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hostile {
    Umask,
    Cdpath,
    ModprobeOptions,
    Path,
    /// A busybox of the user's.
    Busybox,
    Function,
    Language,
    FileSystemConfig,
    /// Files of the machine: modprobe.d, depmod.d and mke2fs.conf. They need root.
    Machine,
}

const ALL: [Hostile; 9] = [
    Hostile::Umask,
    Hostile::Cdpath,
    Hostile::ModprobeOptions,
    Hostile::Path,
    Hostile::Busybox,
    Hostile::Function,
    Hostile::Language,
    Hostile::FileSystemConfig,
    Hostile::Machine,
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A kernel that ci/setup has fetched.
struct Kernel {
    /// Its line of ci/kernels.lock.
    lock: String,
    packages: PathBuf,
    file: String,
}

impl Kernel {
    fn read() -> Result<Self> {
        let lock = fs::read_to_string(repository().join("ci/kernels.lock"))?;
        let line = lock.lines().find(|line| line.split(' ').next() == Some(KERNEL)).context("No kernel")?;
        let [_, package, version, _] = line.split(' ').collect::<Vec<_>>()[..] else { bail!("{line:?}") };
        let packages = std::env::var_os("FORESHORE_DEB_CACHE").map(PathBuf::from);
        let packages = packages.unwrap_or_else(|| repository().join("target/ci/debs"));
        let file = format!("{package}_{}_amd64.deb", version.replace(':', "%3a"));
        Ok(Self { lock: format!("{line}\n"), packages: std::path::absolute(packages)?, file })
    }

    /// The first thing that ci/setup would have to fetch or install.
    fn missing(&self) -> Option<String> {
        let is_installed = |program: &&str| {
            ["/usr/bin", "/usr/sbin", "/bin", "/sbin"].iter().any(|dir| Path::new(dir).join(program).exists())
        };
        let file = self.packages.join(&self.file);
        if !file.exists() {
            return Some(file.display().to_string());
        }
        TOOLS.into_iter().find(|tool| !is_installed(tool)).map(str::to_owned)
    }
}

fn can_mount() -> bool {
    let tried = Command::new("unshare").args(["-m", "test", "-f", "/etc/mke2fs.conf"]).output();
    tried.is_ok_and(|output| output.status.success())
}

/// Runs a command, and returns its output.
fn output(what: &str, command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what}: {}: {text}", output.status);
    Ok(output.stdout)
}

/// A copy of the scripts.
struct Tree {
    dir: TempDir,
    packages: PathBuf,
}

impl Tree {
    /// Copies the scripts. Files have the modes of a checkout and a build under `umask`.
    fn new(kernel: &Kernel, umask: u32) -> Result<Self> {
        // Not /tmp, which may be memory.
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?;
        let tree = Self { dir, packages: kernel.packages.clone() };
        for script in SCRIPTS {
            tree.write(script, &fs::read_to_string(repository().join(script))?, 0o755 & !umask)?;
        }
        tree.write("ci/kernels.lock", &kernel.lock, 0o644 & !umask)?;
        // The test must install nothing.
        tree.replace("ci/setup", "    install_tools\n    check_rust\n", "")?;
        for program in OUR_PROGRAMS {
            let path = format!("target/x86_64-unknown-linux-gnu/release/{program}");
            tree.copy(Path::new("/usr/bin/env"), &path, 0o755 & !umask)?;
        }
        tree.add_packages()?;
        tree.add_hostile_files()?;
        Ok(tree)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>, mode: u32) -> Result<()> {
        let path = self.path(path);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        fs::write(&path, content)?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(mode))?)
    }

    fn copy(&self, from: &Path, to: &str, mode: u32) -> Result<()> {
        self.write(to, fs::read(from)?, mode)
    }

    fn replace(&self, path: &str, old: &str, new: &str) -> Result<()> {
        let text = fs::read_to_string(self.path(path))?;
        ensure!(text.contains(old), "{path} has no {old:?}");
        Ok(fs::write(self.path(path), text.replace(old, new))?)
    }

    /// Adds unpacked packages, as `package_tree` in ci/lib.sh leaves them. libc6 has the files of all.
    fn add_packages(&self) -> Result<()> {
        let lib = fs::read_to_string(self.path("ci/lib.sh"))?;
        for list in ["\nEXT4_PACKAGES=\"", "\nXFS_PACKAGES=\""] {
            let (_, rest) = lib.split_once(list).context("ci/lib.sh has no such list")?;
            let names = rest.split('"').next().unwrap_or_default();
            names
                .split_whitespace()
                .try_for_each(|name| fs::create_dir_all(self.path(&format!("target/ci/packages/{name}"))))?;
        }
        let libc6 = "target/ci/packages/libc6";
        self.copy(Path::new("/").join(LOADER).as_path(), &format!("{libc6}/{LOADER}"), 0o755)?;
        let listed = String::from_utf8(output("ldd", Command::new("ldd").arg("/sbin/mke2fs"))?)?;
        for line in listed.lines() {
            if let Some(library) = line.split_once(" => ").and_then(|(_, rest)| rest.split(' ').next()) {
                let name =
                    Path::new(library).file_name().and_then(|name| name.to_str()).context("no name")?;
                self.copy(Path::new(library), &format!("{libc6}/lib/x86_64-linux-gnu/{name}"), 0o644)?;
            }
        }
        PACKAGED_PROGRAMS.iter().try_for_each(|program| {
            self.copy(Path::new("/sbin/mke2fs"), &format!("{libc6}/sbin/{program}"), 0o755)
        })
    }

    fn add_hostile_files(&self) -> Result<()> {
        for program in STAND_INS.split(' ') {
            self.write(&format!("hostile/bin/{program}"), STAND_IN, 0o755)?;
        }
        self.write("hostile/busybox/busybox", STAND_IN, 0o755)?;
        for dir in ["hostile/modprobe.d", "hostile/run/modprobe.d"] {
            self.write(&format!("{dir}/ndctl.conf"), "install libnvdimm /bin/true\n", 0o644)?;
        }
        self.write("hostile/run/depmod.d/other.conf", "exclude kernel\n", 0o644)?;
        self.write("hostile/mke2fs.conf", FILE_SYSTEM_CONFIG, 0o644)
    }

    /// A command in this tree, for a user with these settings.
    fn command(&self, hostile: &[Hostile], line: &str) -> Result<Command> {
        let has = |setting| hostile.contains(&setting);
        let umask = if has(Hostile::Umask) { "077" } else { "022" };
        let mut command = Command::new(if has(Hostile::Machine) { "unshare" } else { "bash" });
        if has(Hostile::Machine) {
            command.args(["-m", "bash", "-c", IN_NAMESPACE, "bash", "bash"]);
        }
        // PATH is set here, so that the commands above are the machine's. env keeps the script's name relative, for CDPATH.
        let mut path = std::env::var("PATH")?;
        for (setting, dir) in [(Hostile::Path, "hostile/bin"), (Hostile::Busybox, "hostile/busybox")] {
            if has(setting) {
                path = format!("{}:{path}", self.path(dir).display());
            }
        }
        command.args(["-c", "umask $0; PATH=$1; shift; exec env \"$@\"", umask, &path]).args(line.split(' '));
        command.current_dir(&self.dir).env("FORESHORE_DEB_CACHE", &self.packages);
        let options = format!("--config={}", self.path("hostile/modprobe.d").display());
        let settings: [(_, _, &dyn AsRef<std::ffi::OsStr>); 6] = [
            (Hostile::Cdpath, "CDPATH", &self.dir.path()),
            (Hostile::ModprobeOptions, "MODPROBE_OPTIONS", &options),
            (Hostile::Function, "BASH_FUNC_cp%%", &"() { :; }"),
            (Hostile::Language, "LANG", &"de_DE.UTF-8"),
            (Hostile::Language, "LC_ALL", &"de_DE.UTF-8"),
            (Hostile::FileSystemConfig, "MKE2FS_CONFIG", &self.path("hostile/mke2fs.conf")),
        ];
        for (setting, name, value) in settings {
            if has(setting) {
                command.env(name, value)
            } else {
                command.env_remove(name)
            };
        }
        Ok(command)
    }

    /// Runs scripts, and reads what they have made.
    fn build(&self, hostile: &[Hostile], lines: &[&str]) -> Result<Images> {
        let mut images = Images::default();
        for &line in lines {
            output(line, &mut self.command(hostile, line)?)?;
            match line {
                GUEST => images.add("guest", self.guest_image()?),
                HOST => {
                    images.add("initrd", archive_files(&fs::read(self.path("target/ci/host/initrd"))?)?);
                    images.add("disk", self.disk_image()?);
                }
                _ => {}
            }
        }
        Ok(images)
    }

    fn guest_image(&self) -> Result<Files> {
        let image = self.path(&format!("target/ci/guests/basic-{KERNEL}.img"));
        archive_files(&output("lz4", Command::new("lz4").arg("-dc").arg(image))?)
    }

    fn disk_image(&self) -> Result<Files> {
        let disk = self.path("target/ci/host/root.ext4");
        let dumped = TempDir::new_in(&self.dir)?;
        // It also fails if it may not set an owner.
        let debugfs = Command::new("/sbin/debugfs")
            .args(["-R", &format!("rdump / {}", dumped.path().display())])
            .arg(&disk)
            .output()?;
        let mut files = file_system_properties(&disk)?;
        add_directory(&mut files, "", dumped.path())?;
        ensure!(files.contains_key("/sbin/init"), "{debugfs:?}");
        Ok(files)
    }
}

/// A file of an image. The owner is that in an archive.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    mode: u32,
    owner: (u32, u32),
    content: Vec<u8>,
}

type Files = BTreeMap<String, Entry>;

/// Files of the images by the image's name.
#[derive(Default)]
struct Images(BTreeMap<&'static str, Files>);

impl Images {
    fn add(&mut self, name: &'static str, files: Files) {
        self.0.insert(name, files);
    }

    /// Files that are not the same in the images that `other` has.
    fn differences(&self, other: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for (image, theirs) in &other.0 {
            let ours = &self.0[image];
            let names = ours.keys().chain(theirs.keys().filter(|name| !ours.contains_key(*name)));
            for name in names.filter(|name| ours.get(*name) != theirs.get(*name)) {
                let (one, other) = (shown(ours.get(name)), shown(theirs.get(name)));
                differences.push(format!("{image}, {name}: {one} and {other}"));
            }
        }
        differences
    }
}

fn shown(entry: Option<&Entry>) -> String {
    let shown = |entry: &Entry| {
        let content = &entry.content;
        let start = String::from_utf8_lossy(&content[..content.len().min(40)]).into_owned();
        format!("mode {:o}, owner {:?}, {} bytes, {start:?}", entry.mode, entry.owner, content.len())
    };
    entry.map_or_else(|| "missing".to_owned(), shown)
}

/// Files of a cpio archive in the "newc" format.
fn archive_files(mut archive: &[u8]) -> Result<Files> {
    const HEADER: usize = 110;
    let mut files = Files::new();
    loop {
        ensure!(archive.len() > HEADER && archive.starts_with(b"070701"), "No archive");
        let field = |index: usize| {
            let digits = str::from_utf8(&archive[6 + 8 * index..][..8])?;
            u32::from_str_radix(digits, 16).with_context(|| format!("{digits:?} is not a hexadecimal number"))
        };
        let (mode, owner) = (field(1)?, (field(2)?, field(3)?));
        let (size, name_size) = (field(6)? as usize, field(11)? as usize);
        let start = (HEADER + name_size).next_multiple_of(4);
        let next = (start + size).next_multiple_of(4);
        ensure!(archive.len() >= next, "The archive ends early");
        let name = str::from_utf8(&archive[HEADER..HEADER + name_size - 1])?;
        if name == "TRAILER!!!" {
            return Ok(files);
        }
        files
            .insert(name.to_owned(), Entry { mode, owner, content: archive[start..start + size].to_owned() });
        archive = &archive[next..];
    }
}

/// Adds all below `dir`. The guest's image in the host's has time stamps, so only its mode counts.
fn add_directory(files: &mut Files, prefix: &str, dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let metadata = path.symlink_metadata()?;
        let name = format!("{prefix}/{}", path.file_name().context("no name")?.display());
        let content = if metadata.is_symlink() {
            fs::read_link(&path)?.into_os_string().into_encoded_bytes()
        } else if metadata.is_file() && path.extension().is_none_or(|extension| extension != "img") {
            fs::read(&path)?
        } else {
            Vec::new()
        };
        if metadata.is_dir() {
            add_directory(files, &name, &path)?;
        }
        files.insert(name, Entry { mode: metadata.mode(), owner: (0, 0), content });
    }
    Ok(())
}

/// Properties of an ext4 file system, each as a file.
fn file_system_properties(disk: &Path) -> Result<Files> {
    const PROPERTIES: [&str; 6] = [
        "Filesystem features",
        "Block size",
        "Block count",
        "Inode size",
        "Inode count",
        "Reserved block count",
    ];
    let shown = String::from_utf8(output("dumpe2fs", Command::new("/sbin/dumpe2fs").arg("-h").arg(disk))?)?;
    let property = |name: &'static str| {
        let value = shown.lines().find_map(|line| line.strip_prefix(name)).context(name)?;
        Ok((name.to_owned(), Entry { mode: 0, owner: (0, 0), content: value.trim().into() }))
    };
    PROPERTIES.into_iter().map(property).collect()
}

/// A copy of the scripts without one of the protections.
struct Broken {
    file: &'static str,
    old: &'static str,
    new: &'static str,
    /// The setting that changes an image, or fails its build, unless the protection is there.
    hostile: Hostile,
    lines: &'static [&'static str],
    /// A part of the difference or of the failure.
    expected: &'static str,
}

const LIBNVDIMM: &str = "nvdimm/libnvdimm.ko:";
const MKE2FS_CONFIG: &str = "export MKE2FS_CONFIG=/nonexistent/mke2fs.conf\n";
const SYSTEM_PATH: &str = "PATH=$SYSTEM_PATH\n";

/// Copies that are built at the same time.
const WORKERS: usize = 3;

const fn broken(
    file: &'static str,
    old: &'static str,
    new: &'static str,
    hostile: Hostile,
    lines: &'static [&'static str],
    expected: &'static str,
) -> Broken {
    Broken { file, old, new, hostile, lines, expected }
}

/// `Language` has no entry, because no locale changes an image.
const BROKEN: [Broken; 14] = [
    broken(
        LIB,
        "umask 022\n",
        "",
        Hostile::Umask,
        &[GUEST],
        "mode 40755, owner (0, 0), 0 bytes, \"\" and mode 40700",
    ),
    broken(LIB, "unset CDPATH ", "unset ", Hostile::Cdpath, &[GUEST], "kernels.lock (No such file"),
    broken(LIB, " MODPROBE_OPTIONS", "", Hostile::ModprobeOptions, &[GUEST], LIBNVDIMM),
    broken(
        LIB,
        "unset -f $(compgen -A function)\n",
        "",
        Hostile::Function,
        &[GUEST],
        "bin/busybox: No such file",
    ),
    broken(LIB, MKE2FS_CONFIG, "", Hostile::FileSystemConfig, &[HOST], "disk, Filesystem features"),
    broken(LIB, MKE2FS_CONFIG, "", Hostile::Machine, &[HOST], "disk, Filesystem features"),
    broken(LIB, "modprobe -C /dev/null", "modprobe", Hostile::Machine, &[GUEST], LIBNVDIMM),
    broken(LIB, "depmod -C /dev/null", "depmod", Hostile::Machine, &[GUEST], "modules.dep:"),
    broken(
        SETUP,
        "depmod -C /dev/null",
        "depmod",
        Hostile::Machine,
        &[SETUP, GUEST],
        "kernel 6.12 lacks a module",
    ),
    broken(SETUP, SYSTEM_PATH, "", Hostile::Path, &[SETUP, GUEST], "modules.builtin"),
    broken(GUEST_SCRIPT, SYSTEM_PATH, "", Hostile::Path, &[GUEST], "exit status"),
    broken(HOST, SYSTEM_PATH, "", Hostile::Path, &[HOST], "exit status"),
    broken(GUEST_SCRIPT, SYSTEM_PATH, "", Hostile::Busybox, &[GUEST], "guest, bin/busybox:"),
    broken(
        HOST,
        "install -m 755 -t",
        "cp -t",
        Hostile::Umask,
        &[HOST],
        "/usr/bin/foreshore-agent: mode 100755",
    ),
];

impl Broken {
    /// Builds in such a copy, with kernels and guests of `plain_tree`. Returns what differs from `plain`.
    fn differences(&self, kernel: &Kernel, plain_tree: &Tree, plain: &Images) -> Result<Vec<String>> {
        let tree = Tree::new(kernel, if self.hostile == Hostile::Umask { 0o077 } else { 0o022 })?;
        tree.replace(self.file, self.old, self.new)?;
        for (dir, made_by) in [("target/ci/kernels", SETUP), ("target/ci/guests", GUEST)] {
            if !self.lines.contains(&made_by) {
                symlink(plain_tree.path(dir), tree.path(dir))?;
            }
        }
        let built = tree.build(&[self.hostile], self.lines);
        Ok(built.map_or_else(|error| vec![format!("{error:#}")], |images| plain.differences(&images)))
    }

    /// Checks that the setting makes the expected difference in such a copy.
    fn check(&self, kernel: &Kernel, plain_tree: &Tree, plain: &Images) -> Result<()> {
        let what = format!("{:?}, {} with {:?} for {:?}", self.hostile, self.file, self.new, self.old);
        let differences = self.differences(kernel, plain_tree, plain).context(what.clone())?;
        let is_expected = differences.iter().any(|difference| difference.contains(self.expected));
        ensure!(is_expected, "{what}: no {:?} in {differences:#?}", self.expected);
        Ok(())
    }
}

/// Compares images that were built with plain and with hostile settings. Then checks the broken copies.
fn compare(kernel: &Kernel, can_mount: bool) -> Result<()> {
    let is_possible = |setting: &Hostile| can_mount || *setting != Hostile::Machine;
    let hostile: Vec<_> = ALL.into_iter().filter(is_possible).collect();
    let (plain_tree, hostile_tree) = (Tree::new(kernel, 0o022)?, Tree::new(kernel, 0o077)?);
    let (plain, changed) = thread::scope(|scope| {
        let plain = scope.spawn(|| plain_tree.build(&[], &[SETUP, GUEST, HOST]));
        let changed = hostile_tree.build(&hostile, &[SETUP, GUEST, HOST]);
        (plain.join().expect("does not panic"), changed)
    });
    let plain = plain?;
    let differences = plain.differences(&changed?);
    ensure!(differences.is_empty(), "{}", differences.join("\n"));
    let broken: Vec<_> = BROKEN.iter().filter(|broken| is_possible(&broken.hostile)).collect();
    let next = AtomicUsize::new(0);
    // A few at a time, because each has a copy of its own.
    let work = || {
        let mut useless = Vec::new();
        while let Some(broken) = broken.get(next.fetch_add(1, Ordering::Relaxed)) {
            useless.extend(broken.check(kernel, &plain_tree, &plain).err().map(|error| format!("{error:#}")));
        }
        useless
    };
    let useless: Vec<_> = thread::scope(|scope| {
        let workers = [(); WORKERS].map(|()| scope.spawn(work));
        workers.into_iter().flat_map(|worker| worker.join().expect("does not panic")).collect()
    });
    ensure!(useless.is_empty(), "{}", useless.join("\n"));
    Ok(())
}

#[test]
fn images_depend_on_no_setting_of_user_or_machine() {
    let kernel = Kernel::read().unwrap();
    if let Some(missing) = kernel.missing() {
        eprintln!("skipped: {missing} is not there (ci/setup does that)");
        return;
    }
    let can_mount = can_mount();
    if !can_mount {
        eprintln!("skipped: nothing can be mounted here (it needs root), so files of the machine stay");
    }
    compare(&kernel, can_mount).unwrap();
}
