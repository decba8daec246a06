//! Table of formats that no command-line flag overwrites: file systems, members of RAIDs and volume
//! managers, encrypted volumes, partition tables and disk images.
//!
//! The table covers the formats that libblkid of util-linux recognizes by fixed bytes, and the
//! common disk images. The RAIDs of JMicron, VIA and Silicon are omitted, because other files may
//! contain their two to four bytes near the end.
//!
//! An ordinary file can match a format by accident. Such a file is refused although it could have
//! been emptied, and no data is lost. Two rules make such accidents rare:
//!
//! - A name or magic number of at least 4 bytes (`CD001`, `XFSB`) is sufficient. Other text or data
//!   rarely contains it at exactly that position.
//! - A shorter magic number requires further bytes of the header that text does not contain, or a
//!   reason (see `short_format`).

/// Position of a format's magic number in a file or device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MagicPosition {
    /// Offset from the start.
    Start(u64),
    /// Distance from the end, which is first rounded down to a multiple of `align`.
    End { before: u64, align: u64 },
}

use MagicPosition::{End, Start};

/// Format that is identified by bytes at fixed positions.
#[derive(Debug, PartialEq)]
pub struct Format {
    name: &'static str,
    /// Positions of the magic number. A match at one of them is enough.
    positions: &'static [MagicPosition],
    /// Magic numbers. A match of one of them is enough.
    magics: &'static [&'static [u8]],
    /// Further bytes, by their distance from the position. All of them must match.
    additional: &'static [(i64, &'static [u8])],
}

/// Minimum length of a magic number that identifies a format without further bytes.
const MIN_MAGIC_BYTES: usize = 4;

/// Defines a format without further bytes.
///
/// # Panics
/// Panics if one of `magics` has fewer than [`MIN_MAGIC_BYTES`] bytes. The table is evaluated at
/// compile time, so such a row does not compile.
const fn format(
    name: &'static str,
    positions: &'static [MagicPosition],
    magics: &'static [&'static [u8]],
) -> Format {
    let mut nth = 0;
    while nth < magics.len() {
        assert!(
            magics[nth].len() >= MIN_MAGIC_BYTES,
            "an ambiguous signature needs further bytes or a reason"
        );
        nth += 1;
    }
    Format { name, positions, magics, additional: &[] }
}

/// Defines a format that fewer than [`MIN_MAGIC_BYTES`] bytes identify. The caller documents the
/// reason.
const fn short_format(
    name: &'static str,
    positions: &'static [MagicPosition],
    magics: &'static [&'static [u8]],
    reason: &'static str,
) -> Format {
    assert!(!reason.is_empty());
    Format { name, positions, magics, additional: &[] }
}

/// Position at `sectors` sectors before the end.
const fn sectors_before_end(sectors: u64) -> MagicPosition {
    End { before: sectors * SECTOR, align: SECTOR }
}

/// Sector size of formats that count in sectors.
const SECTOR: u64 = 512;

/// File systems, volumes and partition tables. If one format can contain another, the inner format
/// comes first. "Linux" refers to its source, "libblkid" to `libblkid/src` of util-linux.
pub(in crate::pool) const FORMATS: &[Format] = &[
    // Linux fs/xfs/libxfs/xfs_format.h, XFS_SB_MAGIC.
    format("an XFS file system", &[Start(0)], &[b"XFSB"]),
    // Linux fs/xfs/libxfs/xfs_log_format.h, XLOG_HEADER_MAGIC_NUM.
    format("the log of an XFS file system", &[Start(0)], &[b"\xfe\xed\xba\xbe"]),
    // Linux fs/ext4/ext4.h, s_magic.
    short_format(
        "an ext2, ext3 or ext4 file system",
        &[Start(0x438)],
        &[b"\x53\xef"],
        "In UTF-8 text they occur only if `S` precedes U+F000 to U+FFFF; damaged superblocks count.",
    ),
    // Linux include/uapi/linux/btrfs_tree.h, BTRFS_MAGIC.
    format("a Btrfs file system", &[Start(0x10040)], &[b"_BHRfS_M"]),
    // Linux include/linux/f2fs_fs.h: two superblocks.
    format("an F2FS file system", &[Start(0x400), Start(0x1400)], &[b"\x10\x20\xf5\xf2"]),
    // Linux fs/erofs/erofs_fs.h, EROFS_SUPER_MAGIC_V1.
    format("an EROFS file system", &[Start(0x400)], &[b"\xe2\xe1\xf5\xe0"]),
    // Linux fs/squashfs/squashfs_fs.h, SQUASHFS_MAGIC, in both byte orders.
    format("a SquashFS file system", &[Start(0)], &[b"hsqs", b"sqsh"]),
    // Linux include/uapi/linux/cramfs_fs.h. The superblock can follow a boot sector.
    format(
        "a cramfs file system",
        &[Start(0), Start(0x200)],
        &[b"\x45\x3d\xcd\x28", b"\x28\xcd\x3d\x45"],
    ),
    // Linux include/uapi/linux/romfs_fs.h.
    format("a romfs file system", &[Start(0)], &[b"-rom1fs-"]),
    // ECMA-119 8.4.2, and the High Sierra format (Linux include/uapi/linux/iso_fs.h).
    format("an ISO 9660 file system", &[Start(0x8001)], &[b"CD001"]),
    format("a High Sierra file system", &[Start(0x8009)], &[b"CDROM"]),
    // ECMA-167 2/9.1.2: volume structure descriptors of 2,048 bytes or of a block.
    format(
        "a UDF file system",
        &[Start(0x8001), Start(0x8801), Start(0x9001)],
        &[b"BEA01", b"BOOT2", b"CDW02", b"NSR02", b"NSR03", b"TEA01"],
    ),
    // Linux 6.12 fs/reiserfs/reiserfs.h: at 64 KiB, and at 8 KiB in old versions.
    format(
        "a ReiserFS file system",
        &[Start(0x10034), Start(0x2034), Start(0x2014)],
        &[b"ReIsErFs", b"ReIsEr2Fs", b"ReIsEr3Fs"],
    ),
    // libblkid superblocks/reiserfs.c.
    format("a Reiser4 file system", &[Start(0x10000)], &[b"ReIsEr4"]),
    // Linux 6.12 fs/bcachefs/bcachefs_format.h, BCHFS_MAGIC: three superblocks.
    format(
        "a bcachefs file system",
        &[Start(0x1018), Start(0x20_0018), End { before: 0xf_ffe8, align: 1 }],
        &[b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"],
    ),
    // Linux drivers/md/bcache/bcache_ondisk.h, bcache_magic.
    format(
        "a bcache device",
        &[Start(0x1018)],
        &[b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"],
    ),
    // OpenZFS include/sys/vdev_impl.h: each of 4 labels of 256 KiB has at 16 KiB a list in XDR
    // (module/nvpair/nvpair.c): encoding, byte order of the host, version 0, unique names.
    format(
        "a member of a ZFS pool",
        &[
            Start(0x4000),
            Start(0x4_4000),
            End { before: 0x7_c000, align: 0x4_0000 },
            End { before: 0x3_c000, align: 0x4_0000 },
        ],
        &[b"\x01\x01\0\0\0\0\0\0\0\0\0\x01", b"\x01\0\0\0\0\0\0\0\0\0\0\x01"],
    ),
    // OpenZFS include/sys/uberblock_impl.h: the first uberblock of the first label.
    format(
        "a member of a ZFS pool",
        &[Start(0x2_0000)],
        &[b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c"],
    ),
    // Linux fs/jfs/jfs_superblock.h.
    format("a JFS file system", &[Start(0x8000)], &[b"JFS1"]),
    // Linux include/uapi/linux/nilfs2_ondisk.h: revision 2.0 and 0x3434. The magic number alone
    // could be text.
    format(
        "a NILFS2 file system",
        &[Start(0x400), End { before: 0x1000, align: SECTOR }],
        &[b"\x02\0\0\0\0\0\x34\x34"],
    ),
    // Apple File System Reference, nx_superblock_t.
    format("an APFS container", &[Start(0x20)], &[b"NXSB"]),
    // Linux fs/hfsplus/hfsplus_raw.h: signature and version.
    format("an HFS+ file system", &[Start(0x400)], &[b"H+\0\x04", b"HX\0\x05"]),
    // Inside Macintosh: Files, 2-60: signature, and the volume bitmap in block 3.
    Format {
        name: "an HFS file system",
        positions: &[Start(0x400)],
        magics: &[b"BD"],
        additional: &[(14, b"\0\x03")],
    },
    // exFAT specification 3.1.2, and the same field of NTFS (Linux fs/ntfs3/ntfs.h) and ReFS
    // (libblkid superblocks/refs.c).
    format("an exFAT file system", &[Start(3)], &[b"EXFAT   "]),
    format("an NTFS file system", &[Start(3)], &[b"NTFS    "]),
    format("a ReFS file system", &[Start(0)], &[b"\0\0\0ReFS\0"]),
    // libblkid superblocks/bitlocker.c. BitLocker To Go has the third.
    format(
        "a BitLocker volume",
        &[Start(0)],
        &[b"\xeb\x52\x90-FVE-FS-", b"\xeb\x58\x90-FVE-FS-", b"\xeb\x58\x90MSWIN4.1"],
    ),
    // FAT specification 3.4, BS_FilSysType of FAT12 and FAT16, and of FAT32.
    format("a FAT file system", &[Start(0x36)], &[b"FAT12   ", b"FAT16   ", b"FAT     ", b"MSDOS"]),
    format("a FAT file system", &[Start(0x52)], &[b"FAT32   ", b"MSWIN"]),
    // Linux fs/hpfs/hpfs.h, SB_MAGIC.
    format("an HPFS file system", &[Start(0x2000)], &[b"\x49\xe8\x95\xf9"]),
    // Linux include/linux/ufs_fs.h, fs/ufs/super.c: fs_magic of superblocks at 0, 8, 64 and 256
    // KiB, in both byte orders.
    format(
        "a UFS file system",
        &[Start(0x55c), Start(0x255c), Start(0x1_055c), Start(0x4_055c)],
        &[
            b"\x54\x19\x01\0",
            b"\0\x01\x19\x54",
            b"\x19\x01\x54\x19",
            b"\x19\x54\x01\x19",
            b"\x12\x56\x19\0",
            b"\0\x19\x56\x12",
            b"\x14\x50\x09\0",
            b"\0\x09\x50\x14",
            b"\x95\x21\x61\0",
            b"\0\x61\x21\x95",
            b"\x94\x19\x23\x05",
            b"\x05\x23\x19\x94",
        ],
    ),
    // Linux fs/gfs2 and include/uapi/linux/gfs2_ondisk.h, GFS2_MAGIC.
    format("a GFS or GFS2 file system", &[Start(0x10000)], &[b"\x01\x16\x19\x70"]),
    // Linux fs/ocfs2/ocfs2_fs.h: the superblock is in block 2. libblkid superblocks/ocfs.c.
    format(
        "an OCFS2 file system",
        &[Start(0x400), Start(0x800), Start(0x1000), Start(0x2000)],
        &[b"OCFSV2"],
    ),
    format("an OCFS file system", &[Start(0x2000)], &[b"OracleCFS"]),
    format("an Oracle ASM disk", &[Start(0x20)], &[b"ORCLDISK"]),
    // Linux include/uapi/linux/magic.h, fs/minix/minix.h and include/linux/minix_fs.h, in both byte
    // orders. The magic number alone could be text, so the zone size must also equal the block
    // size.
    Format {
        name: "a Minix file system",
        positions: &[Start(0x410)],
        magics: &[
            b"\x7f\x13",
            b"\x8f\x13",
            b"\x68\x24",
            b"\x78\x24",
            b"\x13\x7f",
            b"\x13\x8f",
            b"\x24\x68",
            b"\x24\x78",
        ],
        additional: &[(-6, b"\0\0")],
    },
    Format {
        name: "a Minix file system",
        positions: &[Start(0x418)],
        magics: &[b"\x5a\x4d", b"\x4d\x5a"],
        additional: &[(-12, b"\0\0\0\0")],
    },
    // Linux fs/befs/befs_fs_types.h and fs/befs/super.c.
    format("a BeFS file system", &[Start(0x20), Start(0x220)], &[b"BFS1", b"1SFB"]),
    // Linux include/uapi/linux/bfs_fs.h, BFS_MAGIC.
    format("a BFS file system", &[Start(0)], &[b"\xce\xfa\xad\x1b"]),
    // Linux 6.12 include/linux/sysv_fs.h, s_magic of System V and Xenix, in both byte orders.
    format(
        "a System V file system",
        &[Start(0x3f8), Start(0x27f8), Start(0x3ff8), Start(0x4bf8)],
        &[b"\x20\x7e\x18\xfd", b"\xfd\x18\x7e\x20"],
    ),
    format("a Xenix file system", &[Start(0x7f8)], &[b"\x44\x55\x2b\0", b"\0\x2b\x55\x44"]),
    // Linux fs/freevxfs/vxfs.h, VXFS_SUPER_MAGIC, of little-endian and big-endian machines.
    format("a VxFS file system", &[Start(0x400)], &[b"\xf5\xfc\x01\xa5"]),
    format("a VxFS file system", &[Start(0x2000)], &[b"\xa5\x01\xfc\xf5"]),
    // Linux fs/qnx6/qnx6.h and include/uapi/linux/qnx6_fs.h.
    format("a QNX6 file system", &[Start(0), Start(0x2000)], &[b"\x22\x11\x19\x68"]),
    // Linux include/uapi/linux/affs_hardblocks.h and fs/affs/amigaffs.h, FS_OFS to FS_DCFFS.
    format(
        "an AFFS file system",
        &[Start(0)],
        &[
            b"DOS\0", b"DOS\x01", b"DOS\x02", b"DOS\x03", b"DOS\x04", b"DOS\x05", b"DOS\x06",
            b"DOS\x07",
        ],
    ),
    // Linux fs/zonefs/zonefs.h, ZONEFS_MAGIC.
    format("a zonefs file system", &[Start(0)], &[b"SFOZ"]),
    // Linux fs/ubifs/ubifs-media.h, UBIFS_NODE_MAGIC, and drivers/mtd/ubi/ubi-media.h.
    format("a UBIFS file system", &[Start(0)], &[b"\x31\x18\x10\x06"]),
    format("a UBI volume", &[Start(0)], &[b"UBI#"]),
    // Linux include/uapi/linux/jffs2.h: nodes that an image begins with.
    format(
        "a JFFS2 file system",
        &[Start(0)],
        &[b"\x85\x19\x01\xe0", b"\x85\x19\x02\xe0", b"\x85\x19\x03\x20"],
    ),
    // libblkid superblocks/netware.c, vmfs.c, exfs.c, mpool.c, scoutfs.c and bluestore.c.
    format("a Novell NSS file system", &[Start(0x1000)], &[b"SPB5"]),
    format("a VMFS file system", &[Start(0x20_0000)], &[b"\x5e\xf1\xab\x2f"]),
    format("a VMFS volume", &[Start(0x10_0000)], &[b"\x0d\xd0\x01\xc0"]),
    format("an EXFS file system", &[Start(0)], &[b"EXFS"]),
    format("an mpool file system", &[Start(0)], &[b"mpoolDev"]),
    format("a ScoutFS file system", &[Start(0x10004)], &[b"\x8b\x42\x3c\x10"]),
    format("a Ceph BlueStore device", &[Start(0)], &[b"bluestore block device"]),
    // Linux include/linux/swap.h and kernel/power: at the end of the first page of 4 to 64 KiB.
    format("swap space", SWAP_POSITIONS, &[b"SWAPSPACE2", b"SWAP-SPACE"]),
    format(
        "a hibernated system",
        SWAP_POSITIONS,
        &[b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001"],
    ),
    // libblkid superblocks/swap.c: TuxOnIce.
    format("a hibernated system", &[Start(0)], &[b"\xed\xc3\x02\xe9\x98\x56\xe5\x0c"]),
    // LUKS2 On-Disk Format Specification 2.1, and the positions of the second header.
    format("a LUKS volume", &[Start(0)], &[b"LUKS\xba\xbe"]),
    format(
        "a LUKS volume",
        &[
            Start(0x4000),
            Start(0x8000),
            Start(0x1_0000),
            Start(0x2_0000),
            Start(0x4_0000),
            Start(0x8_0000),
            Start(0x10_0000),
            Start(0x20_0000),
        ],
        &[b"SKUL\xba\xbe"],
    ),
    // libblkid superblocks/cs_fvault2.c: version 1, a physical volume header, and CRC-32C.
    Format {
        name: "a FileVault volume",
        positions: &[Start(8)],
        magics: &[b"\x01\0\x10\0"],
        additional: &[(80, b"CS\x01\0\0\0")],
    },
    // Linux Documentation/admin-guide/device-mapper/verity.rst and drivers/md/dm-integrity.c.
    format("a dm-verity device", &[Start(0)], &[b"verity\0\0"]),
    format("a dm-integrity device", &[Start(0)], &[b"integrt\0"]),
    // Linux drivers/md/dm-snap-persistent.c, SNAP_MAGIC.
    format("a dm-snapshot store", &[Start(0)], &[b"SnAp"]),
    // LVM2 lib/format_text/layout.h and lib/label/label.h: in one of the first four sectors.
    format(
        "an LVM physical volume",
        &[Start(0x200), Start(0), Start(0x400), Start(0x600)],
        &[b"LABELONE"],
    ),
    // libblkid superblocks/lvm.c: LVM1, with its version.
    format("an LVM physical volume", &[Start(0)], &[b"HM\x01\0", b"HM\x02\0"]),
    // Linux drivers/md/dm-vdo/encodings.c.
    format("a VDO device", &[Start(0)], &[b"dmvdo001"]),
    // libblkid superblocks/stratis.c: two copies.
    format("a Stratis device", &[Start(0x204), Start(0x1204)], &[b"!Stra0tis\x86\xff\x02^\x41rh"]),
    // Linux include/uapi/linux/raid/md_p.h, MD_SB_MAGIC: versions 1.2, 1.1, 1.0 and 0.90, the last
    // in the byte order of the machine.
    format(
        "a member of a Linux RAID",
        &[
            Start(0x1000),
            Start(0),
            End { before: 0x2000, align: 0x1000 },
            End { before: 0x1_0000, align: 0x1_0000 },
        ],
        &[b"\xfc\x4e\x2b\xa9", b"\xa9\x2b\x4e\xfc"],
    ),
    // libblkid superblocks/drbd.c, drbdmanage.c and drbdproxy_datalog.c.
    format(
        "a DRBD device",
        &[End { before: 0xfc4, align: 1 }],
        &[b"\x83\x74\x02\x6b", b"\x83\x74\x02\x6c", b"\x83\x74\x02\x6d"],
    ),
    format("a DRBD device", &[Start(0)], &[b"$DRBDmgr=q", b"DRBDdlh*"]),
    // SNIA Common RAID Disk Data Format 4.1, and libblkid superblocks/ddf_raid.c.
    format(
        "a member of a firmware RAID",
        &[sectors_before_end(1), sectors_before_end(257)],
        &[b"\xde\x11\xde\x11"],
    ),
    // libblkid superblocks/isw_raid.c, lsi_raid.c, nvidia_raid.c, adaptec_raid.c,
    // highpoint_raid.c and promise_raid.c.
    format(
        "a member of a firmware RAID",
        &[sectors_before_end(2)],
        &[b"Intel Raid ISM Cfg Sig. ", b"NVIDIA  "],
    ),
    format(
        "a member of a firmware RAID",
        &[sectors_before_end(1)],
        &[b"$XIDE$", b"\x37\xfc\x4d\x1e"],
    ),
    format(
        "a member of a firmware RAID",
        &[sectors_before_end(11)],
        &[b"\xf3\x16\x78\x5a", b"\xfd\x16\x78\x5a"],
    ),
    format(
        "a member of a firmware RAID",
        &[Start(0x1220)],
        &[b"\xf0\x16\x78\x5a", b"\xfd\x16\x78\x5a"],
    ),
    format(
        "a member of a firmware RAID",
        &[
            sectors_before_end(16),
            sectors_before_end(63),
            sectors_before_end(255),
            sectors_before_end(256),
            sectors_before_end(399),
            sectors_before_end(591),
            sectors_before_end(675),
            sectors_before_end(735),
            sectors_before_end(911),
            sectors_before_end(951),
            sectors_before_end(974),
            sectors_before_end(991),
            sectors_before_end(3087),
        ],
        &[b"Promise Technology, Inc."],
    ),
    // Linux drivers/nvdimm/pfn.h.
    format("an fsdax namespace", &[Start(0x1000)], &[b"NVDIMM_PFN_INFO\0"]),
    format("a devdax namespace", &[Start(0x1000)], &[b"NVDIMM_DAX_INFO\0"]),
    // Linux drivers/nvdimm/btt.h and btt_devs.c: version 1.1 at 4 KiB, version 2 at 0, and the
    // copy at the end of the arena.
    format(
        "a BTT",
        &[Start(0x1000), Start(0), End { before: 0x1000, align: 0x1000 }],
        &[b"BTT_ARENA_INFO\0\0"],
    ),
    // UEFI specification 5.3.2, for sectors of 512 and 4,096 bytes, and the copy in the last
    // sector.
    format(
        "a GPT partition table",
        &[
            Start(0x200),
            Start(0x1000),
            sectors_before_end(1),
            End { before: 0x1000, align: 0x1000 },
        ],
        &[b"EFI PART"],
    ),
    // Linux block/partitions/mac.c, with the size of a block.
    format("an Apple partition table", &[Start(0)], &[b"ER\x02\0", b"ER\x08\0", b"ER\x10\0"]),
    // libblkid partitions/bsd.c, sgi.c, sun.h, ultrix.c and aix.c, and Linux block/partitions.
    format("a BSD disk label", &[Start(0x200), Start(0x40), Start(0x80)], &[b"\x57\x45\x56\x82"]),
    format("an SGI disk label", &[Start(0)], &[b"\x0b\xe5\xa9\x41"]),
    // The magic number has two bytes that may occur in text, so the sanity word of the table of
    // contents is required too.
    Format {
        name: "a Sun disk label",
        positions: &[Start(0x1fc)],
        magics: &[b"\xda\xbe"],
        additional: &[(-0x140, b"\x60\x0d\xde\xee")],
    },
    format("an Ultrix partition table", &[Start(0x3fb8)], &[b"\x57\x29\x03\0\x01\0\0\0"]),
    format("an AIX disk label", &[Start(0)], &[b"\xc9\xc2\xd4\xc1"]),
    // Linux block/partitions/amiga.c: the Rigid Disk Block is in one of the first 16 sectors.
    format(
        "an Amiga partition table",
        &[Start(0), Start(0x200), Start(0x400), Start(0x800)],
        &[b"RDSK"],
    ),
    // UEFI specification 5.2.1. FAT and other file systems also begin with a boot sector.
    short_format(
        "a partition table or boot sector",
        &[Start(0x1fe)],
        &[b"\x55\xaa"],
        "They are not valid UTF-8, and a boot sector has no other fixed bytes.",
    ),
];

const SWAP_POSITIONS: &[MagicPosition] =
    &[Start(0xff6), Start(0x1ff6), Start(0x3ff6), Start(0x7ff6), Start(0xfff6)];

/// Formats of disk images, from the specifications and from QEMU's block/*.c.
pub(in crate::pool) const IMAGES: &[Format] = &[
    // QEMU docs/interop/qcow2.txt, also of version 1, and docs/interop/qed_spec.rst.
    format("a qcow2 image", &[Start(0)], &[b"QFI\xfb"]),
    format("a QED image", &[Start(0)], &[b"QED\0"]),
    // VMware Virtual Disk Format 5.0, and QEMU block/vmdk.c. The last one belongs to sparse VMFS
    // images.
    format(
        "a VMDK image",
        &[Start(0)],
        &[b"KDMV", b"COWD", b"# Disk DescriptorFile", b"\xbe\xba\xfe\xca\0\0\0\0"],
    ),
    // Microsoft MS-VHDX 2.2.1, and the Virtual Hard Disk Image Format. Fixed images have only the
    // footer.
    format("a VHDX image", &[Start(0)], &[b"vhdxfile"]),
    format("a VHD image", &[Start(0), sectors_before_end(1)], &[b"conectix"]),
    // QEMU docs/interop/parallels.txt.
    format("a Parallels image", &[Start(0)], &[b"WithoutFreeSpace", b"WithouFreSpacExt"]),
    // QEMU block/vdi.c, bochs.c and dmg.c.
    format("a VDI image", &[Start(0x40)], &[b"\x7f\x10\xda\xbe"]),
    format("a Bochs image", &[Start(0)], &[b"Bochs Virtual HD Image"]),
    format("a DMG image", &[sectors_before_end(1)], &[b"koly"]),
    // Android system/core/libsparse/sparse_format.h.
    format("an Android sparse image", &[Start(0)], &[b"\x3a\xff\x26\xed"]),
];

/// Returns all formats, in the order in which content is compared with them.
pub fn all_formats() -> impl Iterator<Item = &'static Format> {
    FORMATS.iter().chain(IMAGES)
}

/// Returns the first of `formats` that the content matches. `read` fills its argument with the
/// bytes at an offset, and returns false if the content ends before. `len_bytes` is the length of
/// the content. If it is unknown, the end is not examined.
pub(in crate::pool) fn find<E>(
    formats: impl IntoIterator<Item = &'static Format>,
    len_bytes: Option<u64>,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<bool, E>,
) -> Result<Option<&'static Format>, E> {
    for format in formats {
        if format.matches(len_bytes, &mut read)? {
            return Ok(Some(format));
        }
    }
    Ok(None)
}

/// Returns the first of `formats` that matches a file or device with the first bytes `head`.
pub(in crate::pool) fn find_at_start(
    formats: impl IntoIterator<Item = &'static Format>,
    head: &[u8],
) -> Option<&'static Format> {
    let read = |offset: u64, into: &mut [u8]| {
        let bytes = usize::try_from(offset).ok().and_then(|at| head.get(at..)?.get(..into.len()));
        if let Some(bytes) = bytes {
            into.copy_from_slice(bytes);
        }
        Ok::<_, std::convert::Infallible>(bytes.is_some())
    };
    let Ok(found) = find(formats, None, read);
    found
}

impl MagicPosition {
    /// Returns the offset in content of this length, or `None` if the content is too short or its
    /// length is unknown.
    fn offset(self, len_bytes: Option<u64>) -> Option<u64> {
        match self {
            Start(offset) => Some(offset),
            End { before, align } => {
                let len_bytes = len_bytes?;
                (len_bytes - len_bytes % align).checked_sub(before)
            }
        }
    }
}

/// Adds `distance`, which may be negative, to `offset`.
fn offset_at(offset: u64, distance: i64) -> u64 {
    offset.checked_add_signed(distance).expect("offsets at the start need bytes of the file")
}

impl Format {
    /// Name of the format with an article, for error messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns every combination of offsets and bytes by which content of `len_bytes` can match
    /// this format.
    pub fn samples(&self, len_bytes: u64) -> impl Iterator<Item = Vec<(u64, &'static [u8])>> {
        self.positions.iter().filter_map(move |position| position.offset(Some(len_bytes))).flat_map(
            move |offset| {
                self.magics.iter().map(move |magic| {
                    let additional = self
                        .additional
                        .iter()
                        .map(|(distance, bytes)| (offset_at(offset, *distance), *bytes));
                    std::iter::once((offset, *magic)).chain(additional).collect()
                })
            },
        )
    }

    fn matches<E>(
        &self,
        len_bytes: Option<u64>,
        read: &mut impl FnMut(u64, &mut [u8]) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let mut has = |offset: u64, bytes: &[u8]| {
            let mut found = [0; 32];
            let found = &mut found[..bytes.len()];
            Ok(read(offset, found)? && found == bytes)
        };
        for offset in self.positions.iter().filter_map(|position| position.offset(len_bytes)) {
            for magic in self.magics {
                if !has(offset, magic)? {
                    continue;
                }
                let mut all = true;
                for (distance, bytes) in self.additional {
                    all = all && has(offset_at(offset, *distance), bytes)?;
                }
                if all {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}

/// Length of test content. The length includes the positions of all formats.
#[cfg(test)]
pub(in crate::pool) const SAMPLE_BYTES: u64 = 4 * crate::CHUNK_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "further bytes or a reason")]
    fn row_with_too_few_bytes_is_refused() {
        format("a short one", &[Start(0)], &[b"XFSB", b"BD\0"]);
    }

    #[test]
    fn additional_bytes_do_not_occur_in_text() {
        for format in all_formats().filter(|format| !format.additional.is_empty()) {
            let is_text =
                |bytes: &[u8]| std::str::from_utf8(bytes).is_ok_and(|text| !text.contains('\0'));
            let additional: Vec<_> = format.additional.iter().map(|(_, bytes)| *bytes).collect();
            assert!(
                !additional.iter().all(|bytes| is_text(bytes)),
                "{}: {additional:x?}",
                format.name
            );
        }
    }
}
