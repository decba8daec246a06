//! The images of the guests and of the emulated host depend on no setting and no program of the
//! user or the machine.
//!
//! Two copies of the wrappers build images, one with plain and one with hostile settings.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use super::tree::{Tree, is_skipped, missing_tool, repository};

const KERNEL: &str = "6.12";
const BUILDS: [&str; 3] = ["ci/setup", "guest/image/build basic-6.12", "ci/xtask/run host-disk"];
const SCRIPTS: [&str; 4] =
    ["ci/nested/init", "ci/nested/root-init", "guest/image/init", "guest/image/acpi-power"];
/// Code that names the packages of the images.
const PACKAGES: &str = "ci/xtask/src/images/trees.rs";
/// Some of the code that the images depend on.
const CODE: [&str; 3] = [PACKAGES, "ci/xtask/src/programs.rs", "ci/xtask/Cargo.toml"];
const OUR_PROGRAMS: [&str; 3] = ["foreshore-agent", "guest-shell", "guest-tool"];
/// Programs of the images that come from Debian packages. Here each is the machine's mke2fs.
const PACKAGED_PROGRAMS: [&str; 6] =
    ["mke2fs", "mkfs.ext4", "e2fsck", "fsck.ext4", "resize2fs", "mkfs.xfs"];
const LOADER: &str = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
/// Programs that stand first in the PATH of a hostile user.
const STAND_INS: &str = "awk basename busybox cat chmod cp cpio cut depmod dpkg du find flock grep install ln lz4 \
                         mkdir mke2fs modprobe mv rm sed sha256sum sort stat strip tar xargs xz";
const STAND_IN: &str = "#!/bin/sh\necho a stand-in\n";
const FILE_SYSTEM_CONFIG: &str = "[defaults]\n base_features = sparse_super\n blocksize = 1024\n inode_size = 128\n\
                                  [fs_types]\n ext4 = {\n  features = ^extent\n }\n";
/// Takes the places of /run, for kmod's configuration, and of /etc/mke2fs.conf.
const IN_NAMESPACE: &str = "mount --bind hostile/run /run && mount --bind hostile/mke2fs.conf /etc/mke2fs.conf && exec \"$@\"";

/// Settings of a user and of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Settings {
    Plain,
    /// Hostile umask, variables and programs of the user.
    User,
    /// As `User`, with hostile modprobe.d, depmod.d and mke2fs.conf of the machine, which only root
    /// can write.
    Machine,
}

/// A kernel that ci/setup has fetched.
pub(crate) struct Kernel {
    lock: String,
    packages: PathBuf,
    file: String,
}

impl Kernel {
    pub(crate) fn read() -> Result<Self> {
        let lock = fs::read_to_string(repository().join("ci/kernels.lock"))?;
        let line = lock
            .lines()
            .find(|line| line.split(' ').next() == Some(KERNEL))
            .context("No kernel")?;
        let [_, package, version, _] = line.split(' ').collect::<Vec<_>>()[..] else {
            bail!("{line:?}")
        };
        let packages = std::env::var_os("FORESHORE_DEB_CACHE").map(PathBuf::from);
        let packages = packages.unwrap_or_else(|| repository().join("target/ci/debs"));
        let file = format!("{package}_{}_amd64.deb", version.replace(':', "%3a"));
        Ok(Self { lock: format!("{line}\n"), packages: std::path::absolute(packages)?, file })
    }

    /// The first thing that ci/setup would have to fetch or install.
    pub(crate) fn missing(&self) -> Option<String> {
        let file = self.packages.join(&self.file);
        if file.exists() {
            missing_tool().map(str::to_owned)
        } else {
            Some(file.display().to_string())
        }
    }
}

fn can_mount() -> bool {
    let tried = Command::new("unshare").args(["-m", "test", "-f", "/etc/mke2fs.conf"]).output();
    tried.is_ok_and(|output| output.status.success())
}

fn output(what: &str, command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what}: {}: {text}", output.status);
    Ok(output.stdout)
}

/// A tree that images are built in.
pub(crate) struct Builder {
    tree: Tree,
}

impl Builder {
    pub(crate) fn new(kernel: &Kernel, umask: u32) -> Result<Self> {
        // Not /tmp, which may be memory.
        let tree = Tree::new(Path::new(env!("CARGO_TARGET_TMPDIR")), umask, ":")?;
        SCRIPTS.iter().try_for_each(|script| tree.copy_script(script))?;
        tree.write("ci/kernels.lock", &kernel.lock, 0o644 & !umask)?;
        for file in CODE {
            tree.copy(&repository().join(file), file, 0o644 & !umask)?;
        }
        for program in OUR_PROGRAMS {
            let path = format!("target/x86_64-unknown-linux-gnu/release/{program}");
            tree.copy(Path::new("/usr/bin/env"), &path, 0o755 & !umask)?;
        }
        let builder = Self { tree };
        fs::create_dir_all(builder.tree.path("target/ci"))?;
        symlink(&kernel.packages, builder.tree.path("target/ci/debs"))?;
        builder.add_packages()?;
        builder.add_hostile_files()?;
        Ok(builder)
    }

    pub(crate) fn into_tree(self) -> Tree {
        self.tree
    }

    /// Adds unpacked packages as they are after a download. libc6 has the files of all.
    fn add_packages(&self) -> Result<()> {
        let code = fs::read_to_string(self.tree.path(PACKAGES))?;
        for list in ["pub const EXT4:", "pub const XFS:"] {
            let (_, rest) = code.split_once(list).context("No such list")?;
            let (names, _) = rest.split_once("programs:").context("No end of the list")?;
            let (_, names) = names.split_once("packages: &[\"").context("No packages")?;
            let names = names.split('"').next().unwrap_or_default().replace('\\', "");
            for name in names.split_whitespace() {
                fs::create_dir_all(self.tree.path(&format!("target/ci/packages/{name}")))?;
            }
        }
        let libc6 = "target/ci/packages/libc6";
        self.tree.copy(&Path::new("/").join(LOADER), &format!("{libc6}/{LOADER}"), 0o755)?;
        let listed = String::from_utf8(output("ldd", Command::new("ldd").arg("/sbin/mke2fs"))?)?;
        for (_, rest) in listed.lines().filter_map(|line| line.split_once(" => ")) {
            let library = rest.split(' ').next().context("no path")?;
            let name = library.rsplit('/').next().context("no name")?;
            let copied = format!("{libc6}/lib/x86_64-linux-gnu/{name}");
            self.tree.copy(library.as_ref(), &copied, 0o644)?;
        }
        PACKAGED_PROGRAMS.iter().try_for_each(|program| {
            self.tree.copy(Path::new("/sbin/mke2fs"), &format!("{libc6}/sbin/{program}"), 0o755)
        })
    }

    fn add_hostile_files(&self) -> Result<()> {
        for program in STAND_INS.split(' ') {
            self.tree.write(&format!("hostile/bin/{program}"), STAND_IN, 0o755)?;
        }
        fs::create_dir_all(self.tree.path("hostile/cdpath/ci/xtask"))?;
        self.tree.write("hostile/busybox/busybox", STAND_IN, 0o755)?;
        for dir in ["hostile/modprobe.d", "hostile/run/modprobe.d"] {
            let path = format!("{dir}/ndctl.conf");
            self.tree.write(&path, "install libnvdimm /bin/true\n", 0o644)?;
        }
        self.tree.write("hostile/run/depmod.d/other.conf", "exclude kernel\n", 0o644)?;
        self.tree.write("hostile/mke2fs.conf", FILE_SYSTEM_CONFIG, 0o644)
    }

    fn command(&self, settings: Settings, line: &str) -> Result<Command> {
        let is_hostile = settings != Settings::Plain;
        let umask = if is_hostile { "077" } else { "022" };
        let is_machine = settings == Settings::Machine;
        let mut command = Command::new(if is_machine { "unshare" } else { "bash" });
        if is_machine {
            command.args(["-m", "bash", "-c", IN_NAMESPACE, "bash", "bash"]);
        }
        // PATH is set here, so that the commands above are the machine's. env keeps the script's
        // name relative, for CDPATH.
        let hostile = |path: &str| self.tree.path("hostile").join(path).display().to_string();
        let mut path = self.tree.user_path()?;
        if is_hostile {
            // The user's busybox is in a separate folder.
            path = format!("{}:{}:{path}", hostile("busybox"), hostile("bin"));
        }
        command
            .args(["-c", "umask $0; PATH=$1; shift; exec env \"$@\"", umask, &path])
            .args(line.split(' '));
        command.current_dir(self.tree.folder());
        let settings = [
            ("CDPATH", hostile("cdpath")),
            // A function that bash has exported.
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

    /// Builds the images, and reads them.
    fn build(&self, settings: Settings) -> Result<Images> {
        for line in BUILDS {
            output(line, &mut self.command(settings, line)?)?;
        }
        let initrd = archive_files(&fs::read(self.tree.path("target/ci/host/initrd"))?)?;
        let images =
            [("guest", self.guest_image()?), ("initrd", initrd), ("disk", self.disk_image()?)];
        Ok(images.into())
    }

    fn guest_image(&self) -> Result<Files> {
        let image = self.tree.path(&format!("target/ci/guests/basic-{KERNEL}.img"));
        let files = archive_files(&output("lz4", Command::new("lz4").arg("-dc").arg(image))?)?;
        // This machine may itself have a command of kmod's configuration in place of the module.
        ensure!(files.keys().any(|name| name.ends_with("/libnvdimm.ko")), "A module is missing");
        Ok(files)
    }

    fn disk_image(&self) -> Result<Files> {
        let disk = self.tree.path("target/ci/host/root.ext4");
        let dumped = TempDir::new_in(self.tree.folder())?;
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
type Images = BTreeMap<&'static str, Files>;

/// Files that differ between the two.
fn differences(one: &Images, other: &Images) -> Vec<String> {
    let mut differences = Vec::new();
    for (image, theirs) in other {
        let ours = &one[image];
        let names = ours.keys().chain(theirs.keys().filter(|name| !ours.contains_key(*name)));
        for name in names.filter(|name| ours.get(*name) != theirs.get(*name)) {
            let (one, other) = (shown(ours.get(name)), shown(theirs.get(name)));
            differences.push(format!("{image}, {name}: {one} and {other}"));
        }
    }
    differences
}

fn shown(entry: Option<&Entry>) -> String {
    let shown = |entry: &Entry| {
        let content = &entry.content;
        let start = String::from_utf8_lossy(&content[..content.len().min(40)]).into_owned();
        format!(
            "mode {:o}, owner {:?}, {} bytes, {start:?}",
            entry.mode,
            entry.owner,
            content.len()
        )
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
            u32::from_str_radix(digits, 16)
                .with_context(|| format!("{digits:?} is not a hexadecimal number"))
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
        files.insert(
            name.to_owned(),
            Entry { mode, owner, content: archive[start..start + size].to_owned() },
        );
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
        } else if metadata.is_file() && path.extension().is_none_or(|extension| extension != "img")
        {
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

fn file_system_properties(disk: &Path) -> Result<Files> {
    const PROPERTIES: [&str; 6] = [
        "Filesystem features",
        "Block size",
        "Block count",
        "Inode size",
        "Inode count",
        "Reserved block count",
    ];
    let shown =
        String::from_utf8(output("dumpe2fs", Command::new("/sbin/dumpe2fs").arg("-h").arg(disk))?)?;
    let property = |name: &'static str| {
        let value = shown.lines().find_map(|line| line.strip_prefix(name)).context(name)?;
        Ok((name.to_owned(), Entry { mode: 0, owner: (0, 0), content: value.trim().into() }))
    };
    PROPERTIES.into_iter().map(property).collect()
}

/// Compares images that were built with plain and with hostile settings.
fn compare(kernel: &Kernel, hostile: Settings) -> Result<()> {
    let (plain_tree, hostile_tree) = (Builder::new(kernel, 0o022)?, Builder::new(kernel, 0o077)?);
    let (plain, changed) = thread::scope(|scope| {
        let plain = scope.spawn(|| plain_tree.build(Settings::Plain));
        let changed = hostile_tree.build(hostile);
        (plain.join().expect("does not panic"), changed)
    });
    let differences = differences(&plain?, &changed?);
    ensure!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

#[test]
fn images_depend_on_no_setting_of_user_or_machine() {
    let kernel = Kernel::read().unwrap();
    if is_skipped(kernel.missing()) {
        return;
    }
    let can_mount = can_mount();
    if !can_mount {
        eprintln!(
            "skipped: nothing can be mounted here (it needs root), so files of the machine stay"
        );
    }
    compare(&kernel, if can_mount { Settings::Machine } else { Settings::User }).unwrap();
}
