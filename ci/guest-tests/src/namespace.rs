//! Converts namespaces in guests that have no ndctl.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Character device /dev/daxN.0.
    DevDax,
    /// Block device with struct pages. DAX requires them, and virtio-pmem always has them.
    FsDax,
}

/// Returns a guest script that converts the raw namespace of a region. It uses the attributes of
/// Linux drivers/nvdimm/pfn_devs.c, with pages of 2 MiB and struct pages in memory.
pub fn convert(region: u32, kind: Kind) -> String {
    let (seed, driver) = match kind {
        Kind::DevDax => ("dax_seed", "dax_pmem"),
        Kind::FsDax => ("pfn_seed", "nd_pmem"),
    };
    format!(
        "set -e
        nd=/sys/bus/nd
        modprobe -a dax_pmem device_dax
        seed=$(cat $nd/devices/region{region}/{seed})
        echo namespace{region}.0 >$nd/drivers/nd_pmem/unbind
        echo ram >$nd/devices/$seed/mode
        echo 2097152 >$nd/devices/$seed/align
        cat /proc/sys/kernel/random/uuid >$nd/devices/$seed/uuid
        echo namespace{region}.0 >$nd/devices/$seed/namespace
        echo $seed >$nd/drivers/{driver}/bind"
    )
}
