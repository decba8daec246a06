//! Stages the files of an image: busybox, kernel modules, and programs with their shared objects.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::trees::ProgramSet;
use crate::apt::Apt;
use crate::checkout::{Checkout, copy, create_folder, remove_file, write};
use crate::jobs;
use crate::kernels;
use crate::programs;

const LOADER: &str = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const BUSYBOX: &str = "/bin/busybox";

pub(super) struct Stage {
    folder: PathBuf,
}

impl Stage {
    pub(super) fn new(folder: PathBuf, folders: &[&str]) -> Result<Self> {
        crate::checkout::remove_folder(&folder)?;
        create_folder(&folder)?;
        folders.iter().try_for_each(|name| create_folder(&folder.join(name)))?;
        Ok(Self { folder })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }

    pub(super) fn write(&self, path: &str, content: &str) -> Result<()> {
        write(&self.path(path), content)
    }

    /// Copies a program. Sets its mode, because the file's own mode depends on the checkout or the
    /// build.
    pub(super) fn install(&self, program: &Path, path: &str) -> Result<()> {
        let target = self.path(path);
        create_folder(target.parent().context("path without a folder")?)?;
        copy(program, &target)?;
        self.make_executable(path)
    }

    pub(super) fn make_executable(&self, path: &str) -> Result<()> {
        let mode = Permissions::from_mode(0o755);
        fs::set_permissions(self.path(path), mode).with_context(|| format!("Cannot change {path}"))
    }

    /// Creates a symbolic link, and replaces an existing one.
    pub(super) fn link(&self, target: &str, path: &str) -> Result<()> {
        remove_file(&self.path(path))?;
        symlink(target, self.path(path)).with_context(|| format!("Cannot link {path}"))
    }

    pub(super) fn add_busybox(&self) -> Result<()> {
        let busybox = programs::find_system("busybox")?;
        create_folder(&self.path("sbin"))?;
        self.install(&busybox, "bin/busybox")?;
        let applets =
            jobs::output(programs::with_path(&busybox, programs::SYSTEM_PATH).arg("--list"))?;
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            self.link(BUSYBOX, &format!("bin/{applet}"))?;
        }
        Ok(())
    }

    /// Adds the files that name users, groups and the machine. `more_users` and `more_groups` are
    /// additional lines.
    pub(super) fn add_names(&self, more_users: &str, more_groups: &str) -> Result<()> {
        self.write("etc/passwd", &format!("root:x:0:0:root:/root:/bin/sh\n{more_users}"))?;
        self.write("etc/group", &format!("root:x:0:\n{more_groups}"))?;
        self.write("etc/hosts", "127.0.0.1 localhost\n")
    }

    /// Adds modules of a kernel, unpacked, with all modules that they depend on and with indexes.
    /// Modules that are built into the kernel are left out, and so are [signatures](unsigned).
    /// Ignores kmod's configuration on this machine (/etc/modprobe.d, /etc/depmod.d). It may
    /// contain `install` commands of packages that replace a module. For example, ndctl's command
    /// replaces libnvdimm.
    pub(super) fn add_modules(
        &self,
        checkout: &Checkout,
        kernel: &str,
        modules: &str,
    ) -> Result<()> {
        let pin = kernels::pin(checkout, kernel)?;
        let (release, tree) = (pin.release(checkout)?, pin.tree(checkout));
        let source = tree.join("lib/modules").join(&release);
        let target = self.path("lib/modules").join(&release);
        create_folder(&target)?;
        for index in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
            copy(&source.join(index), &target.join(index))?;
        }
        let mut modprobe = programs::system("modprobe");
        modprobe.args(["-C", "/dev/null", "-S", &release, "-d"]).arg(&tree);
        let (status, needed) =
            jobs::attempt(modprobe.args(["-a", "--show-depends"]).args(modules.split(' ')))?;
        if !status.success() {
            bail!("kernel {kernel} lacks a module of: {modules}");
        }
        for module in module_paths(&needed) {
            let name = module.strip_prefix(&source).context("modprobe named another folder")?;
            add_module(&module, &target.join(name))?;
        }
        jobs::run(
            programs::system("depmod")
                .args(["-C", "/dev/null", "-b"])
                .arg(&self.folder)
                .arg(&release),
        )
    }

    /// Adds programs from packages, and all shared objects that they need. Everything comes from
    /// these packages.
    pub(super) fn add_programs(
        &self,
        checkout: &Checkout,
        apt: &mut Apt<'_>,
        set: &ProgramSet,
    ) -> Result<()> {
        let root = set.merged(checkout, apt)?;
        create_folder(&self.path("lib64"))?;
        self.link(&format!("/{LOADER}"), "lib64/ld-linux-x86-64.so.2")?;
        let libraries = LIBRARIES.map(|folder| root.join(folder).display().to_string()).join(":");
        let mut objects = BTreeSet::from([PathBuf::from(LOADER)]);
        for program in set.programs.split(' ') {
            let mut list = programs::with_path(root.join(LOADER), programs::SYSTEM_PATH);
            list.args(["--library-path", &libraries, "--list"]).arg(root.join(program));
            let (status, listed) = jobs::attempt(&mut list)?;
            if !status.success() {
                bail!("{program} lacks a shared object");
            }
            objects.insert(PathBuf::from(program));
            let below =
                shared_objects(&listed).filter_map(|object| object.strip_prefix(&root).ok());
            objects.extend(below.map(Path::to_owned));
        }
        objects.iter().try_for_each(|object| self.add_object(&root, object))
    }

    fn add_object(&self, root: &Path, object: &Path) -> Result<()> {
        let target = self.folder.join(object);
        create_folder(target.parent().context("path without a folder")?)?;
        // The packaged program replaces the busybox link of that name in PATH. Busybox's shell
        // would still prefer its own mke2fs, so scripts call mkfs.ext4.
        remove_file(
            &self.path("bin").join(object.file_name().context("path without a file name")?),
        )?;
        copy(&root.join(object), &target)
    }
}

/// Returns the distinct paths in the output of `modprobe --show-depends`. Built-in modules have no
/// path.
fn module_paths(needed: &str) -> BTreeSet<PathBuf> {
    let paths = needed.lines().filter_map(|line| line.strip_prefix("insmod ")?.split(' ').next());
    paths.map(PathBuf::from).collect()
}

fn add_module(module: &Path, target: &Path) -> Result<()> {
    create_folder(target.parent().context("path without a folder")?)?;
    let target = if module.extension().is_some_and(|extension| extension == "xz") {
        let target = target.with_extension("");
        let unpacked = File::create(&target)?;
        jobs::run(programs::system("xz").arg("-dc").arg(module).stdout(unpacked))?;
        target
    } else {
        copy(module, target)?;
        target.to_owned()
    };
    let mut content = fs::read(&target)?;
    content.truncate(unsigned(&content).len());
    Ok(fs::write(&target, content)?)
}

/// Returns a module without its signature, if it has one (`mod_check_sig`,
/// kernel/module_signature.c). On an emulated host, checking the signatures takes half of the time
/// of each boot. Kernels load modules without signatures, and mark themselves as tainted.
fn unsigned(module: &[u8]) -> &[u8] {
    const MARK: &[u8] = b"~Module signature appended~\n";
    let Some((rest, descriptor)) =
        module.strip_suffix(MARK).and_then(<[u8]>::split_last_chunk::<12>)
    else {
        return module;
    };
    let [_, _, _, signer_bytes, key_bytes, _, _, _, signature_bytes @ ..] = *descriptor;
    let bytes = u32::from_be_bytes(signature_bytes) as usize
        + usize::from(signer_bytes)
        + usize::from(key_bytes);
    rest.len().checked_sub(bytes).map_or(module, |end| &rest[..end])
}

/// Returns the paths of shared objects in the output of `ldd`, or of the loader's `--list`.
pub(super) fn shared_objects(listed: &str) -> impl Iterator<Item = &Path> {
    listed.lines().filter_map(|line| {
        let (_, path) = line.split_once(" => ")?;
        let (path, _) = path.split_once(" (0x")?;
        path.starts_with('/').then(|| Path::new(path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_objects_leave_out_the_loader_and_the_vdso() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                      \tlibc.so.6 => /root/lib/libc.so.6 (0x00007f8a)\n\
                      \tlibodd.so => /root/lib/a (b)/libodd.so (0x00007f8b)\n\
                      \tlibnone.so => not found\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f8c)\n";
        let found: Vec<_> = shared_objects(listed).collect();
        assert_eq!(
            found,
            [Path::new("/root/lib/libc.so.6"), Path::new("/root/lib/a (b)/libodd.so")]
        );
    }

    #[test]
    fn signature_is_removed_from_a_module() {
        let descriptor = [0, 0, 2, 3, 4, 0, 0, 0, 0, 0, 1, 5];
        let mark = b"~Module signature appended~\n";
        let signed = [&b"module"[..], &[b's'; 3 + 4 + 0x105], &descriptor, mark].concat();
        assert_eq!(unsigned(&signed), b"module");
        assert_eq!(unsigned(b"module"), b"module");
        let truncated = &signed[7..];
        assert_eq!(unsigned(truncated), truncated);
    }

    #[test]
    fn built_in_and_repeated_modules_have_no_second_path() {
        let needed = "builtin virtio\ninsmod /m/a.ko.xz \ninsmod /m/b.ko option=1\nbuiltin virtio\ninsmod /m/a.ko.xz\n";
        let expected = ["/m/a.ko.xz", "/m/b.ko"].map(PathBuf::from);
        assert_eq!(module_paths(needed), BTreeSet::from(expected));
    }
}
