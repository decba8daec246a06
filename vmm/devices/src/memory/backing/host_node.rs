//! NUMA nodes of the host, and functions that bind memory to a node.

use std::fs;
use std::io;

use thiserror::Error;

/// File that lists the nodes with memory, for example `0-1,3`.
const HAS_MEMORY: &str = "/sys/devices/system/node/has_memory";
/// Maximum number of nodes in any kernel (CONFIG_NODES_SHIFT is at most 10).
const MAX_NODES: usize = 1024;
const WORD_BITS: usize = u64::BITS as usize;

#[derive(Debug, Error)]
pub enum HostNodeError {
    #[error(
        "host_numa_node={node}: the host has no NUMA node {node} with memory; existing nodes: {known}"
    )]
    NoSuchNode {
        node: u32,
        /// Nodes of the host, in the kernel's format.
        known: String,
    },
    #[error("host_numa_node={node}: the host's kernel does not list its nodes in {HAS_MEMORY}")]
    Unknown {
        node: u32,
        #[source]
        source: io::Error,
    },
}

/// Node of the host that has memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNode(u32);

impl HostNode {
    /// Finds the host node with the given number.
    pub fn find(node: u32) -> Result<Self, HostNodeError> {
        let list = fs::read_to_string(HAS_MEMORY)
            .map_err(|source| HostNodeError::Unknown { node, source })?;
        Self::find_in(node, list.trim())
    }

    fn find_in(node: u32, list: &str) -> Result<Self, HostNodeError> {
        let is_in = |range: &str| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let bounds = first.parse::<u32>().ok().zip(last.parse::<u32>().ok());
            bounds.is_some_and(|(first, last)| (first..=last).contains(&node))
        };
        if (node as usize) < MAX_NODES && list.split(',').any(is_in) {
            return Ok(Self(node));
        }
        Err(HostNodeError::NoSuchNode { node, known: list.to_owned() })
    }

    /// Restricts pages that are allocated later in `addr..addr + len` to this node (MPOL_BIND).
    ///
    /// # Safety
    /// The range must be mapped and belong to the caller.
    pub(super) unsafe fn bind(self, addr: usize, len: usize) -> io::Result<()> {
        let mut mask = [0u64; MAX_NODES / WORD_BITS];
        mask[self.0 as usize / WORD_BITS] = 1 << (self.0 as usize % WORD_BITS);
        // The kernel uses one bit less than the number that is passed.
        let bits = MAX_NODES + 1;
        // SAFETY: the policy affects only later pages in the caller's own range. The mask has as
        // many bits as the kernel reads.
        let result = unsafe {
            libc::syscall(libc::SYS_mbind, addr, len, libc::MPOL_BIND, mask.as_ptr(), bits, 0)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the memory policy at `addr`, and a mask of the policy's nodes below 64
    /// (get_mempolicy(2)).
    pub(crate) fn policy_at(addr: u64) -> (libc::c_int, u64) {
        let (mut mode, mut mask) = (-1, [0u64; MAX_NODES / WORD_BITS]);
        /// From <linux/mempolicy.h>, because libc lacks it.
        const MPOL_F_ADDR: libc::c_int = 1 << 1;
        // SAFETY: the call writes to its first two arguments. The mask has the given number of
        // bits.
        let result = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &mut mode,
                mask.as_mut_ptr(),
                MAX_NODES,
                addr,
                MPOL_F_ADDR,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        (mode, mask[0])
    }

    #[test]
    fn only_listed_host_nodes_are_found() {
        for (node, list) in [(0, "0"), (1, "0-1"), (5, "0,2,4-6")] {
            assert_eq!(HostNode::find_in(node, list).unwrap(), HostNode(node));
        }
        for (node, list) in [(1, "0"), (3, "0-2,4"), (77, "0-1"), (0, ""), (4000, "0-5000")] {
            let error = HostNode::find_in(node, list).unwrap_err().to_string();
            let message =
                format!("the host has no NUMA node {node} with memory; existing nodes: {list}");
            assert_eq!(error, format!("host_numa_node={node}: {message}"));
        }
        assert_eq!(HostNode::find(0).unwrap(), HostNode(0));
        assert!(HostNode::find(77).unwrap_err().to_string().contains("host_numa_node=77"));
    }
}
