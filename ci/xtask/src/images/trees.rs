//! Debian packages for the images, and the programs to copy from them.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use crate::apt::Apt;
use crate::checkout::{Checkout, create_folder, remove_folder, write};
use crate::jobs;
use crate::programs;

pub(super) struct ProgramSet {
    /// Folder below target/ci/roots that the packages are merged into.
    name: &'static str,
    /// Lists of package names, separated by spaces.
    packages: &'static [&'static str],
    /// List of paths in the packages, separated by spaces.
    pub programs: &'static str,
}

/// Tools that create, check and grow ext4 file systems.
pub(super) const EXT4: ProgramSet = ProgramSet {
    name: "ext4",
    packages: &["libc6 e2fsprogs libext2fs2 libcom-err2 libblkid1 libuuid1 libss2"],
    programs: "sbin/mke2fs sbin/mkfs.ext4 sbin/e2fsck sbin/fsck.ext4 sbin/resize2fs",
};

/// Tools that create XFS file systems.
pub(super) const XFS: ProgramSet = ProgramSet {
    name: "xfs",
    packages: &["libc6 xfsprogs libblkid1 libuuid1 libinih1 liburcu8"],
    programs: "sbin/mkfs.xfs",
};

/// Programs for the commands of the book. Busybox lacks these programs or some of their options.
pub(super) const BOOK: ProgramSet = ProgramSet {
    name: "book",
    packages: &[
        "libc6 bash libtinfo6 coreutils libacl1 libattr1 libselinux1 libpcre2-8-0 jq libjq1 \
                libonig5 curl libcurl4 libbrotli1 libcom-err2 libffi8 libgmp10 libgnutls30 \
                libgssapi-krb5-2 libhogweed6 libidn2-0 libk5crypto3 libkeyutils1 libkrb5-3 \
                libkrb5support0 libldap-2.5-0 libnettle8 libnghttp2-14 libp11-kit0 libpsl5 \
                librtmp1 libsasl2-2 libssh2-1 libssl3 libtasn1-6 libunistring2 libzstd1 zlib1g",
    ],
    programs: "bin/bash bin/cp usr/bin/curl usr/bin/jq",
};

/// Tools that create and check all other file systems, and that partition disks.
pub(super) const FILE_SYSTEMS: ProgramSet = ProgramSet {
    name: "file-systems",
    packages: &["libc6 xfsprogs f2fs-tools btrfs-progs fdisk libblkid1 libuuid1 libinih1 \
                liburcu8 libselinux1 libpcre2-8-0 libudev1 zlib1g liblzo2-2 libzstd1 libfdisk1 \
                libsmartcols1 libreadline8 libtinfo6"],
    programs: "sbin/mkfs.xfs sbin/xfs_repair sbin/mkfs.f2fs sbin/fsck.f2fs sbin/mkfs.btrfs \
               bin/btrfs sbin/sfdisk",
};

pub(super) const NDCTL: ProgramSet = ProgramSet {
    name: "ndctl",
    packages: &["libc6 ndctl libndctl6 libdaxctl1 libcxl1 libiniparser1 libjson-c5 libkeyutils1 \
                libkmod2 libudev1 libuuid1 libtraceevent1 libtracefs1 liblzma5 libssl3 \
                libzstd1"],
    programs: "usr/bin/ndctl",
};

const REDIS_PACKAGES: &str = "\
    libc6 redis-server redis-tools libjemalloc2 liblzf1 libhiredis0.14 liblua5.1-0 lua-cjson \
    lua-bitop libatomic1 libssl3 libsystemd0 libcap2 libgcrypt20 libgpg-error0 liblz4-1 liblzma5 \
    libzstd1 libgcc-s1 libstdc++6";

pub(super) const REDIS: ProgramSet = ProgramSet {
    name: "redis",
    packages: &[REDIS_PACKAGES],
    programs: "usr/bin/redis-server usr/bin/redis-cli usr/bin/redis-check-rdb \
               usr/bin/redis-benchmark",
};

/// Workloads for guests with too little memory.
pub(super) const WORKLOADS: ProgramSet = ProgramSet {
    name: "workloads",
    packages: &[REDIS_PACKAGES, "sqlite3 libsqlite3-0 libreadline8 libtinfo6 zlib1g tcc"],
    programs: "usr/bin/redis-server usr/bin/sqlite3 usr/bin/tcc",
};

impl ProgramSet {
    /// Returns the folder that contains all packages, unpacked over one another. Creates it if it
    /// is missing.
    pub(super) fn merged(&self, checkout: &Checkout, apt: &mut Apt<'_>) -> Result<PathBuf> {
        let names = self.packages.join(" ");
        let root = checkout.ci("roots").join(self.name);
        let stamp = root.join("packages");
        if fs::read_to_string(&stamp).is_ok_and(|merged| merged.trim_end() == names) {
            return Ok(root);
        }
        remove_folder(&root)?;
        create_folder(&root)?;
        for package in names.split(' ') {
            let tree = apt.unpacked(package)?;
            // -l creates hard links.
            jobs::run(programs::system("cp").arg("-al").arg(tree.join(".")).arg(&root))?;
        }
        write(&stamp, format!("{names}\n"))?;
        Ok(root)
    }
}
