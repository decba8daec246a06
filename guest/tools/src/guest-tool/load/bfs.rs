//! Breadth-first search in a Kronecker graph, like Graph500's reference code. The load generates a
//! list of edges, builds a graph in compressed sparse rows, searches it from several roots, and
//! validates the resulting trees against the list.

use anyhow::{Result, ensure};
use guest_tools::content::Bytes;

use super::{MIB, Phases, mixed};

/// Memory per edge. An edge is stored once in the list and once in the row of each of its ends. As
/// in Graph500, a word has 8 bytes.
const BYTES_PER_EDGE: u64 = 32;
/// Maximum number of edges per vertex. The actual number may be slightly lower.
const EDGE_FACTOR: u64 = 24;
const ROOTS: usize = 3;
const NOBODY: u64 = u64::MAX;

/// Runs the phases `generate`, `build`, `search` and `validate`.
pub(super) fn run(mib: u64, phases: &mut Phases) -> Result<u64> {
    let edges = mib * MIB / BYTES_PER_EDGE;
    let scale = (edges / EDGE_FACTOR).max(2).ilog2();
    phases.begin();
    let list = kronecker(scale, edges);
    phases.end("generate");
    let graph = Graph::build(1 << scale, &list);
    phases.end("build");
    let mut sum = 0;
    let mut searched = Vec::new();
    for index in 0..ROOTS {
        // The root is a vertex with neighbors. Other vertices are not searched.
        let root = list[list.len() / ROOTS * index].0;
        searched.push((root, graph.search(root)));
    }
    phases.end("search");
    for (root, parents) in &searched {
        let levels = validate(*root, parents, &list)?;
        sum = levels
            .iter()
            .filter(|level| **level != NOBODY)
            .fold(sum, |sum, level| mixed(sum, *level));
    }
    phases.end("validate");
    Ok(sum)
}

/// Graph500's generator. Each bit of the two ends selects one of four quadrants, with probabilities
/// 0.57, 0.19, 0.19 and 0.05. Vertices are renumbered, so that a vertex's number does not reveal
/// how many neighbors it has.
fn kronecker(scale: u32, edges: u64) -> Vec<(u64, u64)> {
    let mut random = Bytes::new(u64::from(scale));
    let mut edge = || {
        let (mut from, mut to, mut bits) = (0, 0, 0);
        for level in 0..scale {
            if level % 4 == 0 {
                bits = random.next_u64();
            }
            // Probabilities, multiplied by 65,536.
            let (down, right) = match bits & 0xffff {
                0..37_356 => (0, 0),
                37_356..49_808 => (0, 1),
                49_808..62_260 => (1, 0),
                _ => (1, 1),
            };
            bits >>= 16;
            from = from << 1 | down;
            to = to << 1 | right;
        }
        (renamed(from, scale), renamed(to, scale))
    };
    (0..edges).map(|_| edge()).collect()
}

/// Bijection on numbers of `scale` bits. The bijection multiplies by an odd number and mixes the
/// upper half into the lower half.
fn renamed(vertex: u64, scale: u32) -> u64 {
    let mask = (1 << scale) - 1;
    let mut name = vertex;
    for _ in 0..2 {
        name = name.wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask;
        name ^= name >> scale.div_ceil(2);
    }
    name
}

struct Graph {
    /// Start of each vertex's neighbors, followed by the end of the last vertex's neighbors.
    rows: Vec<u64>,
    neighbours: Vec<u64>,
}

impl Graph {
    fn build(vertices: usize, list: &[(u64, u64)]) -> Self {
        let mut rows = vec![0u64; vertices + 1];
        for (from, to) in list {
            rows[*from as usize + 1] += 1;
            rows[*to as usize + 1] += 1;
        }
        for vertex in 0..vertices {
            rows[vertex + 1] += rows[vertex];
        }
        let mut next = rows.clone();
        let mut neighbours = vec![0u64; list.len() * 2];
        let mut put = |vertex: u64, neighbour: u64| {
            let place = &mut next[vertex as usize];
            neighbours[*place as usize] = neighbour;
            *place += 1;
        };
        for (from, to) in list {
            put(*from, *to);
            put(*to, *from);
        }
        Self { rows, neighbours }
    }

    /// Returns each vertex's parent in a tree of shortest paths from `root`. The root's parent is
    /// the root itself.
    fn search(&self, root: u64) -> Vec<u64> {
        let mut parents = vec![NOBODY; self.rows.len() - 1];
        parents[root as usize] = root;
        let mut queue = Vec::with_capacity(parents.len());
        queue.push(root);
        let mut at = 0;
        while let Some(&vertex) = queue.get(at) {
            at += 1;
            let row = self.rows[vertex as usize] as usize..self.rows[vertex as usize + 1] as usize;
            for &neighbour in &self.neighbours[row] {
                if parents[neighbour as usize] == NOBODY {
                    parents[neighbour as usize] = vertex;
                    queue.push(neighbour);
                }
            }
        }
        parents
    }
}

/// Validates a tree against the list of edges, as Graph500 requires. Returns each vertex's distance
/// from the root.
fn validate(root: u64, parents: &[u64], list: &[(u64, u64)]) -> Result<Vec<u64>> {
    ensure!(parents[root as usize] == root, "The root {root} is not its own parent");
    // 1. It is a tree: from every vertex, the chain of parents leads to the root.
    let mut levels = vec![NOBODY; parents.len()];
    levels[root as usize] = 0;
    let mut way = Vec::new();
    for start in 0..parents.len() as u64 {
        let mut vertex = start;
        while levels[vertex as usize] == NOBODY && parents[vertex as usize] != NOBODY {
            way.push(vertex);
            ensure!(way.len() <= parents.len(), "The path up from {start} is a cycle");
            vertex = parents[vertex as usize];
        }
        while let Some(below) = way.pop() {
            ensure!(levels[vertex as usize] != NOBODY, "The path up from {start} ends at {vertex}");
            levels[below as usize] = levels[vertex as usize] + 1;
            vertex = below;
        }
    }
    // 2. For each edge, both ends are in the tree or neither is, and they are at most one level
    //    apart. The edges of the tree are in the list.
    let mut to_find = parents.to_vec();
    for (from, to) in list {
        let (one, other) = (levels[*from as usize], levels[*to as usize]);
        ensure!(
            (one == NOBODY) == (other == NOBODY) && (one == NOBODY || one.abs_diff(other) <= 1),
            "{from} is at level {one}, its neighbor {to} at {other}"
        );
        for (child, parent) in [(from, to), (to, from)] {
            if to_find[*child as usize] == *parent {
                to_find[*child as usize] = NOBODY;
            }
        }
    }
    to_find[root as usize] = NOBODY;
    let invented = to_find.iter().position(|parent| *parent != NOBODY);
    ensure!(invented.is_none(), "{invented:?} has a parent that is not its neighbor");
    Ok(levels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_is_reproducible() {
        assert_eq!(run(4, &mut Phases::new()).unwrap(), run(4, &mut Phases::new()).unwrap());
    }

    #[test]
    fn renaming_is_one_to_one() {
        for scale in [3, 10, 11] {
            let mut names: Vec<u64> =
                (0..1 << scale).map(|vertex| renamed(vertex, scale)).collect();
            names.sort_unstable();
            assert_eq!(names, (0..1 << scale).collect::<Vec<u64>>());
        }
    }

    #[test]
    fn wrong_tree_is_found() {
        let list = kronecker(10, 8000);
        let graph = Graph::build(1 << 10, &list);
        let root = list[0].0;
        let parents = graph.search(root);
        let levels = validate(root, &parents, &list).unwrap();
        let far = levels.iter().position(|level| *level == 2).unwrap();
        let wrong = |vertex: usize, parent: u64| {
            let mut parents = parents.clone();
            parents[vertex] = parent;
            validate(root, &parents, &list).is_err()
        };
        assert!(wrong(far, root), "a parent that is not a neighbor passed");
        assert!(wrong(far, far as u64), "a vertex that is its own parent passed");
        assert!(wrong(far, NOBODY), "a vertex that was left out passed");
        assert!(wrong(root as usize, list[0].1), "a root with a parent passed");
    }
}
